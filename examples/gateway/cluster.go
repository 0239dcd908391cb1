// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kubernetes"
)

const (
	succession    = 10 * time.Second // how long a changed ModelServer goes on as it was until its engines are known anew
	retryRejected = 30 * time.Second // what was refused may have been in the way of something that is gone
)

// cluster keeps the gateway's models in step with the ModelServer objects of a cluster. An object that makes no sense changes nothing: what
// it was before goes on, and operators are told.
type cluster struct {
	g       *gateway
	config  *rest.Config
	objects *kubernetes.ModelServers
	fixed   []*model // of the file: they go first

	latest chan []kubernetes.ModelServer // the newest list, until it is looked at
	quit   context.Context               // ends when the gateway drains: nothing is followed any more
	halt   context.CancelFunc
	halted chan struct{}
	brink  context.Context // ends when what leaves is to be cut
	cut    context.CancelFunc

	served  map[string]*object // by name; run's alone
	leaving sync.WaitGroup     // models that end; begun by run alone

	mu       sync.Mutex
	known    bool       // there has been a list
	rejected []rejected // by name
}

// object is a ModelServer object that is served.
type object struct {
	uid        string
	generation int64
	model      *model
}

// rejected is an object that is not served as it is now.
type rejected struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

func newCluster(g *gateway, spec *clusterSpec) (*cluster, error) {
	config, err := kubernetes.Config(spec.Kubeconfig)
	if err != nil {
		return nil, err
	}
	c := &cluster{g: g, config: config, fixed: g.models(), latest: make(chan []kubernetes.ModelServer, 1), halted: make(chan struct{}), served: map[string]*object{}}
	c.quit, c.halt = context.WithCancel(context.Background())
	c.brink, c.cut = context.WithCancel(context.Background())
	c.objects, err = kubernetes.NewModelServers(&kubernetes.ModelServerOptions{Config: config, Namespace: spec.Namespace,
		OnError: func(err error) { g.log.Warn("ModelServers", "error", err) }})
	return c, err
}

// run serves the cluster's ModelServers until ctx ends, and returns when all that has left has ended.
func (c *cluster) run(ctx context.Context) error {
	defer c.leaving.Wait()
	defer close(c.halted)
	watching, stop := context.WithCancel(ctx)
	defer context.AfterFunc(c.quit, stop)()
	failed := make(chan error, 1)
	go func() { failed <- c.objects.Watch(watching, c.publish) }()
	var list []kubernetes.ModelServer
	for {
		var again <-chan time.Time
		if len(c.rejected) > 0 {
			again = time.After(retryRejected)
		}
		select {
		case err := <-failed:
			stop()
			return err
		case list = <-c.latest:
		case <-again:
		}
		if watching.Err() == nil {
			c.follow(ctx, watching, list)
		}
	}
}

// publish hands a list on. One that nobody has looked at yet is of no interest any more.
func (c *cluster) publish(list []kubernetes.ModelServer) {
	select {
	case <-c.latest:
	default:
	}
	c.latest <- list // has room: this is the only sender
}

// follow has a list served: what is new at once, what has changed as soon as its engines are known.
func (c *cluster) follow(ctx, watching context.Context, list []kubernetes.ModelServer) {
	taken := map[string]string{} // models, and who serves them
	for _, m := range c.fixed {
		taken[m.Model()] = "the configuration file"
	}
	// Who serves a model keeps it, whatever its name.
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b kubernetes.ModelServer) int {
		return strings.Compare(c.order(a), c.order(b))
	})
	next := map[string]*object{}
	var refused []rejected
	for _, ms := range list {
		name := key(ms)
		o, err := c.object(ctx, ms, taken)
		if err != nil {
			refused = append(refused, rejected{name, err.Error()})
			if o = c.served[name]; o == nil || taken[o.model.Model()] != "" {
				continue
			}
		}
		taken[o.model.Model()] = name
		next[name] = o
	}
	c.refuse(refused)
	c.await(watching, next)
	c.replace(next)
}

// order puts those that are served before the others.
func (c *cluster) order(ms kubernetes.ModelServer) string {
	if c.served[key(ms)] != nil {
		return "0" + key(ms)
	}
	return "1" + key(ms)
}

// object returns the model of an object, started: the one that is served if it has not changed.
func (c *cluster) object(ctx context.Context, ms kubernetes.ModelServer, taken map[string]string) (*object, error) {
	if o := c.served[key(ms)]; o != nil && o.uid == ms.UID && o.generation == ms.Generation {
		return o, nil
	}
	parsed, err := parseObject(ms, c.config)
	if err != nil {
		return nil, err
	}
	if other := taken[parsed.Model()]; other != "" {
		return nil, fmt.Errorf("spec.model is served by %s already", other)
	}
	m, err := c.g.buildModel(parsed)
	if err != nil {
		return nil, err
	}
	if err := m.start(ctx, c.g.log); err != nil {
		return nil, err
	}
	return &object{ms.UID, ms.Generation, m}, nil
}

// parseObject reads an object as the same document in a file is read. Its engines are pods of its own namespace: whoever may write
// ModelServers must not lead the gateway to files, addresses or other namespaces.
func parseObject(ms kubernetes.ModelServer, owner *rest.Config) (*modelServer, error) {
	docs, fs := readYAML(key(ms), ms.Object) // JSON is YAML
	l := &loader{cfg: &config{}, faults: fs}
	if len(docs) != 1 {
		return nil, errors.New("it is not one object")
	}
	m := l.modelServer(docs[0])
	m.owner = owner
	for _, kind := range m.discoveryKinds() {
		if kind != "kubernetes" {
			l.add(docs[0], &connector.FieldError{Path: "spec.discovery." + kind, Problem: "is not allowed in a cluster's object", Remedy: "leave it out, or write kubernetes: {service, port}"})
		}
	}
	if k := m.discovery.Kubernetes; k.Kubeconfig != "" || k.Namespace != "" && k.Namespace != ms.Namespace {
		l.add(docs[0], &connector.FieldError{Path: "spec.discovery.kubernetes", Problem: "leads to another cluster or namespace", Remedy: "leave kubeconfig and namespace out"})
	}
	var errs []error
	for _, f := range l.faults.sorted() {
		errs = append(errs, f.FieldError)
	}
	return m, errors.Join(errs...)
}

// refuse remembers what is not served as it is, and tells what is new of it.
func (c *cluster) refuse(now []rejected) {
	old, _ := c.refused()
	for _, r := range now {
		if !slices.Contains(old, r) {
			c.g.log.Warn("a ModelServer is not served as it is", "name", r.Name, "reason", r.Reason, "servedAsBefore", c.served[r.Name] != nil)
		}
	}
	slices.SortFunc(now, func(a, b rejected) int { return strings.Compare(a.Name, b.Name) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rejected, c.known = now, true
}

// refused lists what is not served as it is, and whether the cluster has been heard of at all.
func (c *cluster) refused() (list []rejected, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rejected, c.known
}

// await waits until the engines of successors are known, so that a change of a ModelServer fails no request.
func (c *cluster) await(ctx context.Context, next map[string]*object) {
	ctx, cancel := context.WithTimeout(ctx, succession)
	defer cancel()
	for name, o := range next {
		if old := c.served[name]; old != nil && old != o {
			_ = o.model.set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return s.Version > 0 }) // else as it is then
		}
	}
}

// replace routes requests to the next models, and lets those that they replace end.
func (c *cluster) replace(next map[string]*object) {
	models := slices.Clone(c.fixed)
	for _, name := range slices.Sorted(maps.Keys(next)) {
		models = append(models, next[name].model)
	}
	if err := c.g.setModels(models); err != nil {
		c.g.log.Error("routes", "error", err) // models differ, so this does not happen
	}
	for name, o := range next {
		if c.served[name] != o {
			c.g.log.Info("a ModelServer is served", "name", name, "model", o.model.Model(), "connector", o.model.Main.Name, "generation", o.generation)
		}
	}
	for name, old := range c.served {
		if next[name] == old {
			continue
		}
		c.g.log.Info("a ModelServer ends", "name", name, "model", old.model.Model(), "generation", old.generation)
		c.leaving.Go(func() {
			ctx, cancel := context.WithTimeout(c.brink, time.Duration(c.g.cfg.gateway.DrainTimeout))
			defer cancel()
			old.model.drain(ctx, c.g.log)
			old.model.end()
		})
	}
	c.served = next
}

// drained waits for the models that leave until ctx ends, then cuts what they still do.
func (c *cluster) drained(ctx context.Context) {
	stop := context.AfterFunc(ctx, c.cut)
	defer stop()
	c.leaving.Wait()
}

// key is an object's name to operators: both API groups may have one NAMESPACE/NAME.
func key(ms kubernetes.ModelServer) string { return ms.Namespace + "/" + ms.Name + " of " + ms.Group }
