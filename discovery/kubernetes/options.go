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

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

// Options say which cluster to ask, and for which engines. Config is required, and one of Selector.MatchLabels,
// Selector.PDGroup and Services.
type Options struct {
	// Config says how to reach the cluster; see [Config]. It is copied. Its Timeout is not used, since watches are
	// long.
	Config *rest.Config

	// Cluster is the first part of the endpoints' IDs and groups. Set it if several clusters are sources of one set, so
	// that engines of two clusters never form a pair. "" is for one cluster. It must not contain a slash.
	Cluster string

	Namespace string // "" is default

	// Selector says which pods are engines, and their roles. With Services it applies to the pods behind the services,
	// and leaves out those that it does not match.
	Selector Selector

	// Services names services. The source then reads their EndpointSlices in place of pods.
	Services []Service

	// Port is the engines' port: a number, or the name of a container's port (with Services, of the service's port). ""
	// means the container port named http, else 8000; with Services the service's only port, else its port named http.
	// Ports of a service that are named alike but for a number (http-0, http-1) are those of ranks, as Ports are.
	Port string

	// Ports are the ports of each pod, one for each data-parallel rank, in the order of the ranks, in place of Port:
	// each port is an engine with an endpoint of its own, whose ID ends in the port. See the package's documentation.
	// Copied.
	Ports []int

	// of the engines' URLs: http (default) or https. A URL's host is always an IP address, and so is the name in a
	// certificate
	Scheme string
	// Attributes are added to all endpoints whose annotations do not set them. They may contain the same variables.
	// Copied.
	Attributes map[string]string

	// Nodes makes the source read zones from nodes, for pods without a zone label. It needs the right to list and watch
	// nodes, which is cluster-wide; without the right, the zone stays empty. With Services it is seldom needed, since
	// EndpointSlices have the zone.
	Nodes bool

	// OnError is called once for each fault until the fault changes: the API server does not respond, or refuses (with
	// the verb and the resource), a pod has no such port, an annotation makes no sense. As long as there is no list, a
	// fault of the API server is reported at once; later only after it has lasted 5 s, since a restart is no fault.
	// Several goroutines may call it, and it must be quick. It may be nil.
	OnError func(error)
}

// Selector chooses pods, as workloadSelector of a ModelServer does. A pod must have all labels of MatchLabels. Without
// PDGroup each such pod has role both.
type Selector struct {
	MatchLabels map[string]string
	PDGroup     *PDGroup
}

// PDGroup gives pods their roles. A pod with all labels of PrefillLabels has role prefill, with all of DecodeLabels
// decode, with both sets both, and with all of EncodeLabels encode. A pod with none of the sets, or without the label
// GroupKey, is no engine. An empty set matches no pod. A pod that encodes and has another role becomes two endpoints;
// the ID of the second ends in /encode.
type PDGroup struct {
	GroupKey      string // a pair has the same value of this label; "": all engines are one group
	PrefillLabels map[string]string
	DecodeLabels  map[string]string
	EncodeLabels  map[string]string // for an encode stage; not in the design documents
}

// Service names a service whose EndpointSlices are read.
type Service struct {
	Name string // in Options.Namespace

	// Role is the role of all its endpoints. Their group is then the service's label PDGroup.GroupKey, if that is
	// given, and pods are not read. With 0 the pods behind the service decide, by Selector and their annotations; this
	// needs the right to list and watch pods.
	Role discovery.Role
}

// clone returns a copy with defaults. It shares nothing that the caller may change.
func (o *Options) clone() Options {
	c := *o
	c.Namespace = cmp.Or(o.Namespace, "default")
	c.Scheme = cmp.Or(o.Scheme, "http")
	c.Services = slices.Clone(o.Services)
	c.Attributes, c.Ports = maps.Clone(o.Attributes), slices.Clone(o.Ports)
	c.Selector.MatchLabels = maps.Clone(o.Selector.MatchLabels)
	if g := o.Selector.PDGroup; g != nil {
		c.Selector.PDGroup = &PDGroup{
			GroupKey: g.GroupKey, PrefillLabels: maps.Clone(g.PrefillLabels),
			DecodeLabels: maps.Clone(g.DecodeLabels), EncodeLabels: maps.Clone(g.EncodeLabels),
		}
	}
	return c
}

// check returns the first fault of options with defaults.
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
	if len(o.Ports) > 0 {
		if _, err := config.ParsePorts(config.Ports(o.Ports).String()); err != nil || o.Port != "" {
			return errors.New("kubernetes: Ports are not ports from 1 to 65535, each once, or there is a Port, too")
		}
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

// labels returns the selector by which the API server chooses pods, so that other pods are not sent.
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

// parsePort returns a number or a name; neither for "".
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
