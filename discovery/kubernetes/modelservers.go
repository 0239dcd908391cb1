// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// ModelServerGroups returns the API groups of ModelServer objects: that of the design documents, and Kthena's. The
// manifests have a definition for each, with one schema. Objects are of version v1alpha1.
func ModelServerGroups() []string {
	return []string{"networking.matrixinfer.ai", "networking.serving.volcano.sh"}
}

// ModelServerOptions say which objects to watch. Config is required.
type ModelServerOptions struct {
	Config    *rest.Config // of the cluster; see [Config]. Not changed; its timeout does not bound watches
	Namespace string       // "" is default
	Groups    []string     // empty: [ModelServerGroups]

	// OnError is told what is wrong, each fault once until it changes: the API server does not answer, or refuses (with
	// the verb and the resource), or has ModelServers in none of the groups. Meanwhile the last list stays. Called from
	// several goroutines, and must be quick. Nil allowed.
	OnError func(error)
}

// ModelServer is one object as the cluster has it.
type ModelServer struct {
	Group           string
	Namespace       string
	Name            string
	UID             string
	Generation      int64  // rises with each change of the spec
	ResourceVersion string // one that the object has had with this spec

	// Object is the object's apiVersion, kind, metadata (name and namespace only) and spec, without managedFields and
	// status.
	Object json.RawMessage
}

// ModelServers watches the ModelServer objects of a namespace. Methods may be called concurrently.
type ModelServers struct {
	http      *http.Client
	client    dynamic.Interface
	namespace string
	groups    []string
	onError   func(error)

	absent   time.Duration // between looks for a definition that is not installed
	confirm  time.Duration // until the second look for one that seems to be gone
	length   time.Duration // of a watch, until the server is asked to end it; up to twice of it
	patience time.Duration // with an API server that has worked
}

// NewModelServers checks the options. It does not speak to the cluster.
func NewModelServers(o *ModelServerOptions) (*ModelServers, error) {
	if o == nil || o.Config == nil {
		return nil, errors.New("kubernetes: ModelServerOptions.Config is missing")
	}
	m := &ModelServers{namespace: cmp.Or(o.Namespace, "default"), groups: slices.Clone(o.Groups), onError: o.OnError}
	m.absent, m.confirm, m.length, m.patience = 15*time.Second, time.Second, 5*time.Minute, patience
	if len(m.groups) == 0 {
		m.groups = ModelServerGroups()
	}
	if len(validation.IsDNS1123Label(m.namespace)) > 0 {
		return nil, fmt.Errorf("kubernetes: %q is not a namespace", m.namespace)
	}
	for i, group := range m.groups {
		if len(validation.IsDNS1123Subdomain(group)) > 0 {
			return nil, fmt.Errorf("kubernetes: %q is not an API group", group)
		}
		if slices.Contains(m.groups[:i], group) {
			return nil, fmt.Errorf("kubernetes: API group %q is given twice", group)
		}
	}
	config := dynamic.ConfigFor(o.Config)
	config.Timeout = 0 // lists have one of their own, and watches are long
	config.UserAgent = cmp.Or(o.Config.UserAgent, "pdkit")
	// a deprecated version is no line on stderr
	config.WarningHandler, config.WarningHandlerWithContext = nil, rest.NoWarnings{}
	var err error
	if m.http, err = rest.HTTPClientFor(config); err == nil {
		m.client, err = dynamic.NewForConfigAndClient(config, m.http)
	}
	if err != nil {
		return nil, fmt.Errorf("kubernetes: Config: %w", err)
	}
	return m, nil
}

// Watch calls publish with all objects, sorted by namespace, name and group: first when it knows those of all groups,
// then each time that one comes, goes or has another spec (not another status or other labels). A group whose
// definition is not installed has no objects, and is looked for every 15 seconds. An object of the same name in both
// groups is listed twice. Trouble with the API server never ends Watch and never changes the list. It returns nil when
// ctx has ended; publish is called from its goroutine, and what it gets is never changed afterwards.
func (m *ModelServers) Watch(ctx context.Context, publish func([]ModelServer)) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		(&clients{http: m.http}).closeIdle()
	}()
	reports := make(chan modelServerReport)
	t := &troubles{tell: m.tell, changed: func() {}, patience: m.patience, calls: map[call]*trouble{}}
	for i, group := range m.groups {
		of := schema.GroupVersionResource{Group: group, Version: "v1alpha1", Resource: "modelservers"}
		w := &modelServerWatch{
			ModelServers: m, index: i, resource: of.GroupResource().String(),
			client:  m.client.Resource(of).Namespace(m.namespace),
			reports: reports, troubles: t,
		}
		wg.Go(func() { w.run(ctx) })
	}
	v := modelServerView{groups: m.groups, latest: make([]modelServerReport, len(m.groups))}
	for {
		var r modelServerReport
		select {
		case <-ctx.Done():
			return nil
		case r = <-reports:
		}
		changed, fault := v.take(r)
		if fault != nil {
			m.tell(fault)
		}
		if changed {
			t.published()
			publish(v.all())
		}
	}
}

func (m *ModelServers) tell(err error) {
	if m.onError != nil {
		m.onError(err)
	}
}

// modelServerView is what is known of all groups.
type modelServerView struct {
	groups    []string
	latest    []modelServerReport // of each group's objects
	published bool
}

// take takes a report in. It returns whether the list is to be published, and what is to be told.
func (v *modelServerView) take(r modelServerReport) (changed bool, fault error) {
	v.latest[r.index] = r
	if slices.ContainsFunc(v.latest, func(r modelServerReport) bool { return !r.known }) {
		return false, nil
	}
	if !slices.ContainsFunc(v.latest, func(r modelServerReport) bool { return !r.absent }) {
		fault = fmt.Errorf("kubernetes: no ModelServer definition is installed, in %s", strings.Join(v.groups, " or "))
	}
	changed = r.changed || !v.published
	v.published = true
	return changed, fault
}

func (v *modelServerView) all() []ModelServer {
	all := []ModelServer{}
	for _, r := range v.latest {
		all = append(all, r.list...)
	}
	slices.SortFunc(all, func(a, b ModelServer) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name),
			strings.Compare(a.Group, b.Group))
	})
	return all
}
