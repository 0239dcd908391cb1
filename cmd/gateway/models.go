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
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery/kubernetes"
)

const (
	lookAgain = 100 * time.Millisecond // how soon those that are to take over are looked at again
	// with a successor to find the engines that its predecessor knows not to answer
	patience = 10 * time.Second
	// how long the connections of a pool that was replaced stay usable for requests that pass through, which no flow
	// counts: one may have looked its engine up just before
	afterlife = time.Second
)

// modelSet keeps the gateway's models in step with the configuration file and with the ModelServer objects of a
// cluster. What has a fault changes nothing: its last good form stays in service, and the log says so. A model of the
// file goes before that of an object.
type modelSet struct {
	g       *gateway
	cluster *cluster // nil: the models are those of the file

	files  chan filed      // configurations that were read again
	quit   context.Context // ends when the gateway drains: nothing is followed any more
	halt   context.CancelFunc
	halted chan struct{}
	life   context.Context // ends when the requests of objects that are gone are to be cut
	cut    context.CancelFunc

	// The rest but the last is run's alone, and before that apply's.
	file     map[string]*object // by name: those of the file
	wanted   map[string]*object // by name: what all objects are by their last acceptable form
	routes   map[string]*object // by model: who serves it. Not the wanted one while nobody knows its engines
	followed time.Time          // when wanted was made
	leaving  sync.WaitGroup     // objects that end

	mu      sync.Mutex
	waiting []rejected // whose engines are not known yet
}

// filed is a configuration of the file, and where to say whether it is served now.
type filed struct {
	cfg    *configuration
	result chan error
}

// object is a form of a ModelServer, started.
type object struct {
	name       string // that of the cluster's object, or inFile
	raw        json.RawMessage
	generation int64 // for the log: an object that is restored may have one twice
	model      *model
	known      time.Time // when its engines were first seen to be known; zero: they are not yet
}

// inFile is the name of the file's object for a model. Those of a cluster have another form: see key.
func inFile(model string) string { return fmt.Sprintf("%q of the configuration file", model) }

// rejected is an object that is not served as it is now.
type rejected struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// canFollow reports whether the new form knows as much about its engines as the old one: that they are there, and which
// of them do not answer.
func (o *object) canFollow(before *object) bool {
	if o.model.pool == before.model.pool {
		return true
	}
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

func newModelSet(g *gateway) *modelSet {
	r := &modelSet{g: g, files: make(chan filed), halted: make(chan struct{}), wanted: map[string]*object{},
		routes: map[string]*object{}}
	r.quit, r.halt = context.WithCancel(context.Background())
	r.life, r.cut = context.WithCancel(context.Background())
	return r
}

// run follows the file and the cluster until ctx ends, and returns when all that has left has ended.
func (r *modelSet) run(ctx context.Context) {
	defer r.leaving.Wait()
	var watch sync.WaitGroup
	defer watch.Wait()
	defer close(r.halted)
	defer r.abandon()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(r.quit, stop)
	var lists <-chan []kubernetes.ModelServer
	if r.cluster != nil {
		lists = r.cluster.latest
		watch.Go(func() { ended(r.g.log, "ModelServers", r.cluster.objects.Watch(watching, r.cluster.publish)) })
	}
	for {
		var again, look <-chan time.Time
		if r.cluster != nil && len(r.cluster.rejected) > 0 {
			again = time.After(time.Until(r.followed.Add(retryRejected)))
		}
		if len(r.waiting) > 0 {
			look = time.After(lookAgain)
		}
		select {
		case <-watching.Done():
			return
		case <-look:
			r.settle()
		case f := <-r.files:
			f.result <- r.apply(ctx, f.cfg)
		case list := <-lists:
			r.cluster.list, r.cluster.listed = list, true
			r.follow(ctx)
		case <-again:
			r.follow(ctx)
		}
	}
}

// abandon ends the forms that were to take over and never have. The gateway ends those that serve.
func (r *modelSet) abandon() {
	for _, o := range r.wanted {
		if r.routes[o.model.Model()] != o {
			r.retire(o)
		}
	}
}

// replace serves the models of another configuration. With an error nothing has changed.
func (r *modelSet) replace(cfg *configuration) error {
	f := filed{cfg, make(chan error, 1)}
	select {
	case r.files <- f:
		return <-f.result
	case <-r.halted:
		return errors.New("the gateway is shutting down")
	}
}

// apply serves the models of a configuration. It starts those that are new or not as they were, all of them or none.
func (r *modelSet) apply(ctx context.Context, cfg *configuration) error {
	file := map[string]*object{}
	var fresh []*object
	var errs []error
	for _, ms := range cfg.models {
		name := inFile(ms.Model())
		if o := r.file[name]; o != nil && bytes.Equal(o.raw, ms.doc.JSON) {
			file[name] = o
			continue
		}
		o := &object{name: name, raw: ms.doc.JSON}
		if err := r.start(ctx, o, ms); err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %s: %w", ms.doc.File, ms.doc.Line, ms.label(), err))
			continue
		}
		file[name], fresh = o, append(fresh, o)
	}
	if err := errors.Join(errs...); err != nil {
		for _, o := range fresh {
			r.retire(o)
		}
		return err
	}
	for _, o := range fresh {
		if l := o.model.listed; l != nil {
			l.replace(o.model.Endpoints)
		}
	}
	r.file = file
	r.follow(ctx)
	return nil
}

// follow serves the models of the file and, besides, those of the cluster's list: a new one at once, a changed one as
// soon as its engines are known.
func (r *modelSet) follow(ctx context.Context) {
	if r.quit.Err() != nil || ctx.Err() != nil {
		return
	}
	r.followed = time.Now()
	wanted := maps.Clone(r.file)
	if r.cluster != nil && r.cluster.listed {
		r.followObjects(ctx, wanted)
	}
	for name, o := range r.wanted { // one that was wanted and never served; one that serves ends in settle
		if wanted[name] != o && r.routes[o.model.Model()] != o {
			r.retire(o)
		}
	}
	r.wanted = wanted
	r.settle()
}

// start makes and starts a form of a ModelServer. The form takes over the engines of one that serves the same model, or
// was to serve it, and has found them in the same way.
func (r *modelSet) start(ctx context.Context, o *object, ms *modelServer) (err error) {
	var before []*pool
	for _, other := range []*object{r.routes[ms.Model()], r.wanted[o.name]} {
		if other != nil {
			before = append(before, other.model.pool)
		}
	}
	if o.model, err = r.g.buildModel(ms, before); err != nil {
		return err
	}
	return o.model.start(ctx, r.g)
}

// settle routes each model to its wanted form. Until the engines of that form are known, the form that served before
// goes on, so that a change of a ModelServer fails no request.
func (r *modelSet) settle() {
	routes := map[string]*object{}
	var waiting []rejected
	for _, name := range slices.Sorted(maps.Keys(r.wanted)) {
		o := r.wanted[name]
		model := o.model.Model()
		if before := r.routes[model]; before != nil && before != o && !o.canFollow(before) {
			waiting = append(waiting, rejected{o.name, "its engines are not known yet"})
			o = before
		}
		routes[model] = o
	}
	r.mu.Lock()
	r.waiting = waiting
	r.mu.Unlock()
	models := make([]*model, 0, len(routes))
	for _, model := range slices.Sorted(maps.Keys(routes)) {
		models = append(models, routes[model].model)
	}
	if err := r.g.setModels(models, r.cluster == nil || r.cluster.listed); err != nil {
		r.g.log.Error("routes", "error", err) // they are one for each model, so this does not happen
	}
	before := r.routes
	r.routes = routes
	for model, o := range routes {
		if before[model] != o {
			// a form that is never served leaves its limits and its findings to nobody
			o.model.pool.admission, o.model.pool.attestation = o.model.admission, o.model.attestation
			o.model.pool.decision = o.model.decision
			r.g.log.Info("a ModelServer is served", "name", o.name, "model", model, "connector", o.model.Main.Name,
				"generation", o.generation)
		}
	}
	for model, o := range before {
		if routes[model] != o && r.wanted[o.name] != o {
			r.retire(o)
		}
	}
}

// retire lets a form end when its last request has.
func (r *modelSet) retire(o *object) {
	r.g.log.Info("a ModelServer ends", "name", o.name, "model", o.model.Model(), "generation", o.generation)
	o.model.stop() // its synthetic probe, which the flows do not serve any more
	r.leaving.Go(func() {
		o.model.drain(r.life, r.g.log)
		o.model.end()
	})
}

// notServed returns the objects that are not served as they are now.
func (r *modelSet) notServed() []rejected {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting
}

// drained waits for the models that leave until ctx ends, then cuts what they still do.
func (r *modelSet) drained(ctx context.Context) {
	stop := context.AfterFunc(ctx, r.cut)
	defer stop()
	r.leaving.Wait()
}
