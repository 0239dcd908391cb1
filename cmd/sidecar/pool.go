// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kubernetes"
)

// poolGroup is llm-d's default of --pool-group. The other one is its predecessor, which KServe still names.
const (
	poolGroup    = "inference.networking.k8s.io"
	oldPoolGroup = "inference.networking.x-k8s.io"
)

// poolFlags name the InferencePool whose pods a request may name if no list is given.
type poolFlags struct{ group, namespace, name, kubeconfig string }

// set reads NAMESPACE/NAME, or NAME in the namespace default, as llm-d does.
func (p *poolFlags) set(text string) error {
	namespace, name, found := strings.Cut(text, "/")
	if !found {
		namespace, name = "default", text
	}
	if namespace == "" || name == "" || strings.Contains(name, "/") {
		return errors.New("want NAMESPACE/NAME or NAME")
	}
	p.namespace, p.name = namespace, name
	return nil
}

func (p *poolFlags) check() string {
	switch {
	case p.group != poolGroup && p.group != oldPoolGroup:
		return "--pool-group is not " + poolGroup + " or " + oldPoolGroup
	case p.namespace == "":
		return "--inference-pool-namespace, or INFERENCE_POOL_NAMESPACE, is missing"
	}
	return ""
}

// pool is a source of the pods that an InferencePool selects, at the pool's target ports. It needs the rights list and
// watch on the pool and on pods, and follows both, as llm-d's sidecar does (pkg/sidecar/proxy/allowlist.go).
type pool struct {
	flags   poolFlags
	config  *rest.Config
	objects dynamic.ResourceInterface
	scheme  string
	tell    func(error)
	told    map[string]string // the last fault that was reported of each verb, "" for none
	version uint64
}

// choice is which pods a pool selects, and at which ports.
type choice struct {
	labels map[string]string
	ports  []int
}

// poolPause is the time between two reads of the pool. The last list stays in use meanwhile.
const poolPause = time.Second

func newPool(f *flags, tell func(error)) (*pool, error) {
	config, err := kubernetes.Config(f.pool.kubeconfig)
	if err != nil {
		return nil, err
	}
	quiet := rest.CopyConfig(config)
	quiet.WarningHandler = rest.NoWarnings{}
	client, err := dynamic.NewForConfig(quiet)
	if err != nil {
		return nil, errors.New("the API server's configuration is not usable")
	}
	p := &pool{flags: f.pool, config: config, scheme: "http", tell: tell, told: map[string]string{}}
	if f.tls.prefiller {
		p.scheme = "https"
	}
	version := map[string]string{poolGroup: "v1", oldPoolGroup: "v1alpha2"}[p.flags.group]
	p.objects = client.Resource(
		schema.GroupVersionResource{Group: p.flags.group, Version: version, Resource: "inferencepools"},
	).Namespace(p.flags.namespace)
	return p, nil
}

// Watch follows the pool until ctx ends. If the pool does not exist, the list is empty. If the API server does not
// answer, the list stays.
func (p *pool) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	stop := func() {}
	defer func() { stop() }()
	var last *choice
	for first := true; ctx.Err() == nil; pause(ctx) {
		c, version, err := p.read(ctx)
		if err == nil && (first || !same(last, c)) {
			stop()
			stop = func() {}
			if c == nil {
				p.version++
				publish(discovery.Snapshot{Version: p.version})
				err = errors.New("there is no such InferencePool: no request may name an engine")
			} else {
				stop, err = p.follow(ctx, c, publish)
			}
			last, first = c, false
		}
		if p.fault("list", err); version != "" {
			p.wait(ctx, version)
		}
	}
	return nil
}

// read returns the pool's choice, or nil if the pool does not exist, and the version from which to watch.
func (p *pool) read(ctx context.Context) (*choice, string, error) {
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	list, err := p.objects.List(call, metav1.ListOptions{FieldSelector: "metadata.name=" + p.flags.name})
	if err != nil {
		return nil, "", fmt.Errorf("inferencepools cannot be listed: %s", reason(err))
	}
	if len(list.Items) == 0 {
		return nil, list.GetResourceVersion(), nil
	}
	c, err := p.choice(list.Items[0].Object)
	return c, list.GetResourceVersion(), err
}

// choice reads the pool: kubernetes-sigs/gateway-api-inference-extension, api/v1 and api/v1alpha2,
// inferencepool_types.go.
func (p *pool) choice(object map[string]any) (*choice, error) {
	c := &choice{}
	if p.flags.group == oldPoolGroup {
		c.labels, _, _ = unstructured.NestedStringMap(object, "spec", "selector")
		if port, ok, _ := unstructured.NestedInt64(object, "spec", "targetPortNumber"); ok {
			c.ports = []int{int(port)}
		}
	} else {
		c.labels, _, _ = unstructured.NestedStringMap(object, "spec", "selector", "matchLabels")
		ports, _, _ := unstructured.NestedSlice(object, "spec", "targetPorts")
		for _, entry := range ports {
			fields, _ := entry.(map[string]any)
			if port, ok, _ := unstructured.NestedInt64(fields, "number"); ok {
				c.ports = append(c.ports, int(port))
			}
		}
	}
	if len(c.labels) == 0 || len(c.ports) == 0 {
		return nil, errors.New("the InferencePool has no selector or no target port")
	}
	return c, nil
}

// follow publishes the pods of a choice until it is stopped. All pods count as ready: the scheduler has already chosen
// one, and the list only says which pods belong to the pool.
func (p *pool) follow(ctx context.Context, c *choice, publish func(discovery.Snapshot)) (stop func(), err error) {
	pods, err := kubernetes.New(&kubernetes.Options{
		Config: p.config, Namespace: p.flags.namespace, Selector: kubernetes.Selector{MatchLabels: c.labels},
		Port: strconv.Itoa(c.ports[0]), Scheme: p.scheme, OnError: p.tell,
	})
	if err != nil {
		return func() {}, err
	}
	var src discovery.Source = each{pods, func(e discovery.Endpoint) discovery.Endpoint {
		e.Phase = discovery.PhaseReady
		return e
	}}
	if len(c.ports) > 1 {
		src = spread{src, c.ports}
	}
	inner, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		_ = src.Watch(inner, func(s discovery.Snapshot) { // the error is nil, since it is watched only once
			p.version++
			publish(discovery.Snapshot{Version: p.version, Endpoints: s.Endpoints})
		})
	})
	return func() { cancel(); running.Wait() }, nil
}

// wait returns when the pool has changed or may have changed.
func (p *pool) wait(ctx context.Context, version string) {
	w, err := p.objects.Watch(ctx, metav1.ListOptions{
		FieldSelector: "metadata.name=" + p.flags.name, ResourceVersion: version})
	if err != nil {
		if ctx.Err() == nil && !apierrors.IsResourceExpired(err) {
			p.fault("watch", fmt.Errorf("inferencepools cannot be watched: %s", reason(err)))
		}
		return
	}
	p.fault("watch", nil)
	defer w.Stop()
	select {
	case <-w.ResultChan():
	case <-ctx.Done():
	}
}

// fault reports a verb's fault when it is another than before.
func (p *pool) fault(verb string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != p.told[verb] {
		p.tell(err)
	}
	p.told[verb] = text
}

// reason is the API server's error without its address.
func reason(err error) string {
	return cmp.Or(string(apierrors.ReasonForError(err)), "the API server does not answer")
}

func same(a, b *choice) bool {
	if a == nil || b == nil {
		return a == b
	}
	return maps.Equal(a.labels, b.labels) && slices.Equal(a.ports, b.ports)
}

func pause(ctx context.Context) {
	t := time.NewTimer(poolPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
