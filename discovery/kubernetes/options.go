// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
)

// Options say which cluster to ask, and for what. Config and one of Selector.MatchLabels, Selector.PDGroup and Services
// are required.
type Options struct {
	// Config is how to reach the cluster; see [Config]. It is copied. Its Timeout is not used, since watches last.
	Config *rest.Config

	// Cluster is the first part of the endpoints' IDs and groups, where several clusters are sources of one set:
	// engines of two clusters then never meet. "" for one cluster. A slash is not allowed.
	Cluster string

	Namespace string // "" is default

	// Selector says which pods are engines, and what each is for. With Services it says what the pods behind them are
	// for, and pods that it does not choose are left out.
	Selector Selector

	// Services have the EndpointSlices of these services tell who is there, in place of the pods.
	Services []Service

	// Port is the engines' port: a number, which is taken as it is, or a name: of a container's port, or with Services
	// of the service's. "" is, of a pod, the container port named http, else 8000; of a service its only port, else the
	// one named http.
	Port string

	// of the engines' URLs: http (default) or https. Hosts are IP addresses, in certificates too
	Scheme string
	// of all endpoints, where their annotations say nothing else, with the same variables; copied
	Attributes map[string]string

	// Nodes has the zones of pods taken from their nodes, where no label of the pod says it. It needs list and watch on
	// nodes, which is cluster-wide; where that is refused, the zone stays empty. With Services it is seldom needed:
	// EndpointSlices carry the zone.
	Nodes bool

	// OnError is told what is wrong, each fault once until it changes: the API server does not answer, or refuses (with
	// the verb and the resource), a pod has no such port, an annotation makes no sense. A fault of the API server is
	// told at once as long as there is no list, and later when it has lasted 5 s: restarts are none. OnError is called
	// from several goroutines, and must be quick. Nil allowed.
	OnError func(error)
}

// Selector chooses pods, as workloadSelector of a ModelServer does. A pod must have all labels of MatchLabels; without
// PDGroup each is of role both.
type Selector struct {
	MatchLabels map[string]string
	PDGroup     *PDGroup
}

// PDGroup says what a pod is for. A pod with all labels of PrefillLabels is of role prefill, with all of DecodeLabels
// decode, with both of them both, with all of EncodeLabels encode; with none of them, or without the label GroupKey, it
// is no engine. No labels choose no pods. A pod that encodes and serves another role is two endpoints, the second of
// which has /encode at the end of its ID.
type PDGroup struct {
	GroupKey      string // prefill and decode engines meet within one value of this label; "": all are one group
	PrefillLabels map[string]string
	DecodeLabels  map[string]string
	EncodeLabels  map[string]string // not in the design documents: for an encode stage
}

// Service is a service whose EndpointSlices are read.
type Service struct {
	Name string // in Options.Namespace

	// Role of all its endpoints, whose group is then the service's label PDGroup.GroupKey, if that is given. Pods are
	// not read. 0: what Selector says of the pods behind the service, and their annotations. It needs list and watch on
	// pods.
	Role discovery.Role
}

// clone returns a copy with the defaults filled in, which shares nothing that the caller may change.
func (o *Options) clone() Options {
	c := *o
	c.Namespace = cmp.Or(o.Namespace, "default")
	c.Scheme = cmp.Or(o.Scheme, "http")
	c.Services = slices.Clone(o.Services)
	c.Attributes = maps.Clone(o.Attributes)
	c.Selector.MatchLabels = maps.Clone(o.Selector.MatchLabels)
	if g := o.Selector.PDGroup; g != nil {
		c.Selector.PDGroup = &PDGroup{
			GroupKey: g.GroupKey, PrefillLabels: maps.Clone(g.PrefillLabels),
			DecodeLabels: maps.Clone(g.DecodeLabels), EncodeLabels: maps.Clone(g.EncodeLabels),
		}
	}
	return c
}

// check says what is wrong with options whose defaults are filled in.
func (o *Options) check() error {
	switch {
	case o.Config == nil:
		return errors.New("kubernetes: Config is missing")
	case len(o.Selector.MatchLabels) == 0 && o.Selector.PDGroup == nil && len(o.Services) == 0:
		return errors.New("kubernetes: nothing to look for is given: want Selector.MatchLabels, Selector.PDGroup or " +
			"Services")
	case strings.Contains(o.Cluster, "/"):
		return errors.New("kubernetes: Cluster contains a slash")
	case len(validation.IsDNS1123Label(o.Namespace)) > 0:
		return errors.New("kubernetes: Namespace is not the name of a namespace")
	case o.Scheme != "http" && o.Scheme != "https":
		return errors.New("kubernetes: Scheme is not http or https")
	}
	if _, _, err := parsePort(o.Port); err != nil {
		return err
	}
	return cmp.Or(o.Selector.check(), checkServices(o.Services))
}

func (s Selector) check() error {
	if _, err := s.labels(); err != nil {
		return err
	}
	g := s.PDGroup
	if g == nil {
		return nil
	}
	if len(g.PrefillLabels)+len(g.DecodeLabels)+len(g.EncodeLabels) == 0 {
		return errors.New("kubernetes: Selector.PDGroup has no labels: no pod would have a role")
	}
	for _, of := range []struct {
		field  string
		labels map[string]string
	}{{"PrefillLabels", g.PrefillLabels}, {"DecodeLabels", g.DecodeLabels}, {"EncodeLabels", g.EncodeLabels}} {
		if _, err := labels.ValidatedSelectorFromSet(of.labels); err != nil {
			return fmt.Errorf("kubernetes: Selector.PDGroup.%s has an entry that is not a label", of.field)
		}
	}
	return nil
}

// labels is what the API server chooses pods by. Those that it leaves out cost nothing.
func (s Selector) labels() (labels.Selector, error) {
	selector, err := labels.ValidatedSelectorFromSet(s.MatchLabels)
	if err != nil {
		return nil, errors.New("kubernetes: Selector.MatchLabels has an entry that is not a label")
	}
	if s.PDGroup == nil || s.PDGroup.GroupKey == "" {
		return selector, nil
	}
	grouped, err := labels.NewRequirement(s.PDGroup.GroupKey, selection.Exists, nil)
	if err != nil {
		return nil, errors.New("kubernetes: Selector.PDGroup.GroupKey is not the key of a label")
	}
	return selector.Add(*grouped), nil
}

func checkServices(services []Service) error {
	seen := map[string]bool{}
	for _, s := range services {
		switch {
		case len(validation.IsDNS1123Label(s.Name)) > 0:
			return fmt.Errorf("kubernetes: Services: %q is not the name of a service", s.Name)
		case seen[s.Name]:
			return fmt.Errorf("kubernetes: Services: %q is given twice", s.Name)
		}
		seen[s.Name] = true
		if s.Role != 0 {
			if _, err := discovery.ParseRole(s.Role.String()); err != nil {
				return fmt.Errorf("kubernetes: Services: %q: %w", s.Name, err)
			}
		}
	}
	return nil
}

// parsePort returns a number or a name, or neither.
func parsePort(port string) (number int, name string, err error) {
	if port == "" {
		return 0, "", nil
	}
	if n, err := strconv.Atoi(port); err == nil && n >= 1 && n <= 65535 {
		return n, "", nil
	}
	if len(validation.IsDNS1123Label(port)) > 0 || strings.Trim(port, "0123456789") == "" {
		return 0, "", errors.New("kubernetes: Port is neither one of 1 to 65535 nor the name of a port")
	}
	return 0, port, nil
}
