// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/connector/config/yamlfile"
	"github.com/pdkit/pdkit/discovery/kubernetes"
)

const (
	// how soon what was refused is looked at again: what was in its way may be gone
	retryRejected = 30 * time.Second
	lookAgain     = 100 * time.Millisecond // how soon those that are to take over are looked at again
	// with a successor to find the engines that its predecessor knows not to answer
	patience  = 10 * time.Second
	maxReason = 1000 // bytes
	maxFaults = 20
)

// cluster keeps the gateway's models in step with the ModelServer objects of a cluster. An object with a fault changes
// nothing: its last good form stays in service, and the log says so.
type cluster struct {
	g       *gateway
	config  *rest.Config
	objects *kubernetes.ModelServers
	fixed   []*model // of the file: they go first

	latest chan []kubernetes.ModelServer // the newest list, until it is looked at
	quit   context.Context               // ends when the gateway drains: nothing is followed any more
	halt   context.CancelFunc
	halted chan struct{}
	life   context.Context // ends when the requests of objects that are gone are to be cut
	cut    context.CancelFunc

	// The rest but the last is run's alone.
	wanted  map[string]*object // by name: what the objects are by their last acceptable form
	routes  map[string]*object // by model: who serves it. Not the wanted one while nobody knows that one's engines
	faulty  map[string]faulty  // by name: what cannot be read
	leaving sync.WaitGroup     // objects that end

	mu       sync.Mutex
	heard    bool       // there has been a list
	rejected []rejected // by name; written by run alone
	waiting  []rejected // whose engines are not known yet
}

// object is a form of a ModelServer object, started.
type object struct {
	name       string
	raw        json.RawMessage
	generation int64 // for the log: an object that is restored may have one twice
	model      *model
	known      time.Time // when its engines were first seen to be known; zero: they are not yet
}

// faulty is an object that was refused for what it says.
type faulty struct {
	raw    json.RawMessage
	reason error
}

// canFollow reports whether the new form knows as much about its engines as the old one: that they are there, and which
// of them do not answer.
func (o *object) canFollow(before *object) bool {
	snap := o.model.set.Load()
	if snap.Version == 0 {
		return false
	}
	if o.known.IsZero() {
		o.known = time.Now()
	}
	if time.Since(o.known) > patience {
		return true
	}
	ill := before.model.probes.ill()
	for i := range snap.Endpoints {
		if e := &snap.Endpoints[i]; ill[e.ID] == e.URL.String() && o.model.probes.of(e.ID).healthy {
			return false
		}
	}
	return true
}

// rejected is an object that is not served as it is now.
type rejected struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

func newCluster(g *gateway, spec *clusterSpec) (*cluster, error) {
	config, err := kubernetes.Config(spec.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("spec.modelServers.kubeconfig: %w", err)
	}
	c := &cluster{g: g, config: config, fixed: g.models(), latest: make(chan []kubernetes.ModelServer, 1),
		halted: make(chan struct{}),
		wanted: map[string]*object{}, routes: map[string]*object{}, faulty: map[string]faulty{}}
	c.quit, c.halt = context.WithCancel(context.Background())
	c.life, c.cut = context.WithCancel(context.Background())
	c.objects, err = kubernetes.NewModelServers(&kubernetes.ModelServerOptions{Config: config,
		Namespace: spec.Namespace,
		OnError:   func(err error) { g.log.Warn("ModelServers", "error", err) }})
	return c, err
}

// run serves the cluster's ModelServers until ctx ends, and returns when all that has left has ended.
func (c *cluster) run(ctx context.Context) error {
	defer c.leaving.Wait()
	defer close(c.halted)
	watching, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(c.quit, stop)
	ended := make(chan error, 1)
	go func() { ended <- c.objects.Watch(watching, c.publish) }()
	var list []kubernetes.ModelServer
	var followed time.Time
	for {
		var again, look <-chan time.Time
		if len(c.rejected) > 0 {
			again = time.After(time.Until(followed.Add(retryRejected)))
		}
		if len(c.waiting) > 0 {
			look = time.After(lookAgain)
		}
		select {
		case err := <-ended:
			c.abandon()
			return err
		case <-look:
			c.settle()
			continue
		case list = <-c.latest:
		case <-again:
		}
		c.follow(ctx, watching, list)
		followed = time.Now()
	}
}

// abandon ends the forms that were to take over and never have. The gateway ends those that serve.
func (c *cluster) abandon() {
	for _, o := range c.wanted {
		if c.routes[o.model.Model()] != o {
			c.retire(o)
		}
	}
}

// publish hands a list on, in place of one that has not been looked at yet.
func (c *cluster) publish(list []kubernetes.ModelServer) {
	select {
	case <-c.latest:
	default:
	}
	c.latest <- list // has room: this is the only sender
}

// claim is an object of a list that is not served as it is.
type claim struct {
	kubernetes.ModelServer
	name   string
	parsed *modelServer
}

// follow serves a list: a new object at once, a changed one as soon as its engines are known.
func (c *cluster) follow(ctx, watching context.Context, list []kubernetes.ModelServer) {
	if watching.Err() != nil {
		return
	}
	wanted := map[string]*object{}
	taken := map[string]string{} // models, and who has them
	for _, m := range c.fixed {
		taken[m.Model()] = "the configuration file"
	}
	var refused []rejected
	keep := func(name string) { // what it was, if nobody has its model now
		if o := c.wanted[name]; o != nil && taken[o.model.Model()] == "" {
			wanted[name], taken[o.model.Model()] = o, name
		}
	}
	var claims []claim
	for _, ms := range list { // who stays as it is keeps its model
		name := key(ms)
		if o := c.wanted[name]; o != nil && bytes.Equal(o.raw, ms.Object) {
			keep(name)
			continue
		}
		parsed, err := c.parse(ms)
		if err != nil {
			refused = append(refused, rejected{name, shorten(err.Error())})
			keep(name)
			continue
		}
		claims = append(claims, claim{ms, name, parsed})
	}
	slices.SortStableFunc(claims, func(a, b claim) int { return c.newcomer(a) - c.newcomer(b) })
	var lost []string
	for _, x := range claims {
		o, err := c.start(ctx, x, taken)
		if err != nil {
			refused = append(refused, rejected{x.name, shorten(err.Error())})
			lost = append(lost, x.name)
			continue
		}
		wanted[x.name], taken[x.parsed.Model()] = o, x.name
	}
	for _, name := range lost { // last, since models may go round
		keep(name)
	}
	c.refuse(refused, wanted)
	c.drop(wanted)
	c.settle()
}

// newcomer sorts objects that serve their model already before the others.
func (c *cluster) newcomer(x claim) int {
	if o := c.wanted[x.name]; o != nil && o.model.Model() == x.parsed.Model() {
		return 0
	}
	return 1
}

// start makes an object's new form.
func (c *cluster) start(ctx context.Context, x claim, taken map[string]string) (*object, error) {
	if other := taken[x.parsed.Model()]; other != "" {
		return nil, fmt.Errorf("spec.model is served by %s already", other)
	}
	m, err := c.g.buildModel(x.parsed)
	if err != nil {
		return nil, err
	}
	if err := m.start(ctx, c.g); err != nil {
		return nil, err
	}
	return &object{name: x.name, raw: x.Object, generation: x.Generation, model: m}, nil
}

// parse reads an object, unless it is one that was refused as it is.
func (c *cluster) parse(ms kubernetes.ModelServer) (*modelServer, error) {
	name := key(ms)
	if f, ok := c.faulty[name]; ok && bytes.Equal(f.raw, ms.Object) {
		return nil, f.reason
	}
	parsed, err := parseObject(ms, c.config)
	if delete(c.faulty, name); err != nil {
		c.faulty[name] = faulty{ms.Object, err}
	}
	return parsed, err
}

// shorten bounds what one object can put into logs and responses.
func shorten(reason string) string {
	if len(reason) > maxReason {
		return strings.ToValidUTF8(reason[:maxReason], "") + "…"
	}
	return reason
}

// drop replaces the wanted forms. A form that was wanted and never served ends here. A form that serves ends in settle,
// when nobody needs it any more.
func (c *cluster) drop(wanted map[string]*object) {
	for name, o := range c.wanted {
		if wanted[name] != o && c.routes[o.model.Model()] != o {
			c.retire(o)
		}
	}
	c.wanted = wanted
}

// settle routes each model to its wanted form. Until the engines of that form are known, the form that served before
// goes on, so that a change of a ModelServer fails no request.
func (c *cluster) settle() {
	routes := map[string]*object{}
	var waiting []rejected
	for _, name := range slices.Sorted(maps.Keys(c.wanted)) {
		o := c.wanted[name]
		model := o.model.Model()
		if before := c.routes[model]; before != nil && before != o && !o.canFollow(before) {
			waiting = append(waiting, rejected{name, "its engines are not known yet"})
			o = before
		}
		routes[model] = o
	}
	c.mu.Lock()
	c.waiting = waiting
	c.mu.Unlock()
	models := slices.Clone(c.fixed)
	for _, model := range slices.Sorted(maps.Keys(routes)) {
		models = append(models, routes[model].model)
	}
	if err := c.g.setModels(models); err != nil {
		c.g.log.Error("routes", "error", err) // they are one for each model, so this does not happen
	}
	before := c.routes
	c.routes = routes
	for model, o := range routes {
		if before[model] != o {
			c.g.log.Info("a ModelServer is served", "name", o.name, "model", model, "connector", o.model.Main.Name,
				"generation", o.generation)
		}
	}
	for model, o := range before {
		if routes[model] != o && c.wanted[o.name] != o {
			c.retire(o)
		}
	}
}

// retire lets a form end when its last request has.
func (c *cluster) retire(o *object) {
	c.g.log.Info("a ModelServer ends", "name", o.name, "model", o.model.Model(), "generation", o.generation)
	c.leaving.Go(func() {
		o.model.drain(c.life, c.g.log)
		o.model.end()
	})
}

// parseObject reads an object as the gateway reads the same document in a file. Its engines must be pods of its own
// namespace: who may write ModelServers must not lead the gateway to files, addresses or other namespaces.
func parseObject(ms kubernetes.ModelServer, owner *rest.Config) (*modelServer, error) {
	l := &loader{cfg: &configuration{}}
	doc := &yamlfile.Document{File: key(ms), Line: 1, JSON: ms.Object}
	m := l.modelServer(doc)
	m.owner = owner
	if m.FoundBy != "kubernetes" {
		l.fault(doc, "spec.discovery."+m.FoundBy, "is not allowed in a cluster's object",
			"leave it out, or write kubernetes: {service, port}")
	}
	if k := m.Spec.Discovery.Kubernetes; k.Kubeconfig != "" || k.Namespace != "" && k.Namespace != ms.Namespace {
		l.fault(doc, "spec.discovery.kubernetes", "leads to another cluster or namespace",
			"leave kubeconfig and namespace out")
	}
	return m, reason(l.faults.Sorted())
}

// reason returns the first faults without their places, and how many others there are; nil for none.
func reason(faults yamlfile.Faults) error {
	var errs []error
	for i, f := range faults {
		if i == maxFaults {
			errs = append(errs, fmt.Errorf("and %d more", len(faults)-maxFaults))
			break
		}
		errs = append(errs, f.FieldError)
	}
	return errors.Join(errs...)
}

// refuse keeps the list of objects that are not served as they are, and logs the new ones among them.
func (c *cluster) refuse(now []rejected, wanted map[string]*object) {
	for _, r := range now {
		if !slices.Contains(c.rejected, r) {
			c.g.log.Warn("a ModelServer is not served as it is", "name", r.Name, "reason", r.Reason, "servedAsBefore",
				wanted[r.Name] != nil)
		}
	}
	slices.SortFunc(now, func(a, b rejected) int { return strings.Compare(a.Name, b.Name) })
	for name := range c.faulty {
		if !slices.ContainsFunc(now, func(r rejected) bool { return r.Name == name }) {
			delete(c.faulty, name)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rejected, c.heard = now, true
}

// refused returns the objects that are not served as they are, and whether there has been a list of objects at all.
func (c *cluster) refused() (list []rejected, heard bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append(slices.Clip(c.rejected), c.waiting...), c.heard
}

// drained waits for the models that leave until ctx ends, then cuts what they still do.
func (c *cluster) drained(ctx context.Context) {
	stop := context.AfterFunc(ctx, c.cut)
	defer stop()
	c.leaving.Wait()
}

// key is an object's name to operators: both API groups may have one NAMESPACE/NAME.
func key(ms kubernetes.ModelServer) string { return ms.Namespace + "/" + ms.Name + " of " + ms.Group }
