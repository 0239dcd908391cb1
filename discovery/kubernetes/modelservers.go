// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
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

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// ModelServerGroups returns the API groups of ModelServer objects: the group of the design documents and Kthena's. The
// manifests have a definition for each, with the same schema. Objects have version v1alpha1.
func ModelServerGroups() []string {
	return []string{"networking.matrixinfer.ai", "networking.serving.volcano.sh"}
}

// ModelServerOptions say which objects to watch. Config is required.
type ModelServerOptions struct {
	Config    *rest.Config // of the cluster; see [Config]. It is not changed. Its timeout does not apply to watches
	Namespace string       // "" is default
	Groups    []string     // empty: [ModelServerGroups]

	// OnError is called once for each fault until the fault changes: the API server does not respond, or refuses (with
	// the verb and the resource), or has ModelServers in none of the groups. Meanwhile the last list stays. Several
	// goroutines may call it, and it must be quick. It may be nil.
	OnError func(error)
}

// ModelServer is one object.
type ModelServer struct {
	Group           string
	Namespace       string
	Name            string
	UID             string
	Generation      int64  // rises with each change of the spec
	ResourceVersion string // of some state of the object with this spec

	// Object has the object's apiVersion, kind, metadata (only name and namespace) and spec.
	Object json.RawMessage
}

// ModelServers watches the ModelServer objects of a namespace. Its methods are safe for concurrent use.
type ModelServers struct {
	http      *http.Client
	client    dynamic.Interface
	namespace string
	groups    []string
	onError   func(error)

	absent   time.Duration // between two looks for a definition that is not installed
	confirm  time.Duration // before the second look for a definition that is no longer found
	length   time.Duration // of a watch, before the server is asked to end it; at random up to twice as long
	patience time.Duration // before a fault of an API server that has worked is reported
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
	config.Timeout = 0 // lists have a limit of their own, and watches are long
	config.UserAgent = cmp.Or(o.Config.UserAgent, "pdkit")
	// warnings about deprecated versions would go to stderr
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

// Watch calls publish with all objects, sorted by namespace, name and group. The first call comes when the objects of
// all groups are known; further calls come when an object appears, disappears or gets another spec (not another status
// or other labels). A group whose definition is not installed has no objects; Watch looks for the definition every 15
// seconds. Two objects of the same name in both groups are both listed. Faults of the API server never end Watch and
// never change the list. Watch returns nil when ctx has ended. It calls publish in its own goroutine, and never changes
// a published list.
func (m *ModelServers) Watch(ctx context.Context, publish func([]ModelServer)) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		(&clients{http: m.http}).closeIdle()
	}()
	wake := make(waker, 1)
	t := &troubles{tell: m.tell, changed: func() {}, patience: m.patience, calls: map[call]*trouble{}}
	watches := make([]*modelServerWatch, len(m.groups))
	for i, group := range m.groups {
		watches[i] = m.newWatch(group, t, wake.up)
		wg.Go(func() { watches[i].run(ctx) })
	}
	var last []ModelServer
	for without, published := false, false; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
		}
		if ctx.Err() != nil {
			return nil
		}
		if slices.ContainsFunc(watches, func(w *modelServerWatch) bool { return !w.table.isSynced() }) {
			continue
		}
		was := without
		without = !slices.ContainsFunc(watches, func(w *modelServerWatch) bool { return !w.without.Load() })
		if without && !was {
			m.tell(fmt.Errorf("kubernetes: no ModelServer definition is installed, in %s",
				strings.Join(m.groups, " or ")))
		}
		if list := allModelServers(watches); !published || !slices.EqualFunc(last, list, sameModelServer) {
			last, published = list, true
			t.published()
			publish(list)
		}
	}
}

func (m *ModelServers) tell(err error) {
	if m.onError != nil {
		m.onError(err)
	}
}

// allModelServers returns the objects of all groups.
func allModelServers(watches []*modelServerWatch) []ModelServer {
	all := []ModelServer{}
	for _, w := range watches {
		for _, r := range w.table.snapshot() {
			all = append(all, r.value)
		}
	}
	slices.SortFunc(all, func(a, b ModelServer) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name),
			strings.Compare(a.Group, b.Group))
	})
	return all
}

// sameModelServer reports whether two objects are the same, with the same spec.
func sameModelServer(a, b ModelServer) bool { return a.UID == b.UID && bytes.Equal(a.Object, b.Object) }
