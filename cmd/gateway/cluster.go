// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery/kubernetes"
)

const (
	// how soon what was refused is looked at again: what was in its way may be gone
	retryRejected = 30 * time.Second
	maxReason     = 1000 // bytes
	maxFaults     = 20
)

// cluster is the ModelServer objects of a cluster.
type cluster struct {
	log     *slog.Logger
	config  *rest.Config
	objects *kubernetes.ModelServers
	latest  chan []kubernetes.ModelServer // the newest list, until it is looked at

	// The rest but the last is of modelSet.run alone.
	list   []kubernetes.ModelServer // that was looked at last
	listed bool                     // there has been a list
	faulty map[string]faulty        // by name: what cannot be read

	mu       sync.Mutex
	heard    bool       // what the first list has is served
	rejected []rejected // by name; written by roster.run alone
}

// faulty is an object that was refused for what it says.
type faulty struct {
	raw    json.RawMessage
	reason error
}

func newCluster(log *slog.Logger, spec *clusterSpec) (*cluster, error) {
	config, err := kubernetes.Config(spec.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("spec.modelServers.kubeconfig: %w", err)
	}
	c := &cluster{log: log, config: config, latest: make(chan []kubernetes.ModelServer, 1), faulty: map[string]faulty{}}
	c.objects, err = kubernetes.NewModelServers(&kubernetes.ModelServerOptions{Config: config,
		Namespace: spec.Namespace,
		OnError:   func(err error) { log.Warn("ModelServers", "error", err) }})
	return c, err
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

// takenNames are names of models, and who has them.
type takenNames map[string]string

func (t takenNames) take(m *modelServer, by string) {
	for _, name := range m.called() {
		t[name] = by
	}
}

// by says who has a name of a ModelServer's already, nil if nobody has one.
func (t takenNames) by(m *modelServer) error {
	if other := t[m.Model()]; other != "" {
		return fmt.Errorf("spec.model is served by %s already", other)
	}
	for _, name := range m.further() {
		if other := t[name]; other != "" {
			return fmt.Errorf("%s is served by %s already", config.FieldPath("spec.modelNames", name), other)
		}
	}
	return nil
}

// followObjects adds to wanted the forms of the cluster's objects. An object that serves its model already goes before
// one that does not yet.
func (r *modelSet) followObjects(ctx context.Context, wanted map[string]*object) {
	taken := takenNames{}
	for _, o := range wanted {
		taken.take(o.model.modelServer, "the configuration file")
	}
	var refused []rejected
	keep := func(name string) (kept bool) { // what it was, if nobody has its model now
		o := r.wanted[name]
		if kept = o != nil && taken.by(o.model.modelServer) == nil; kept {
			wanted[name] = o
			taken.take(o.model.modelServer, name)
		}
		return kept
	}
	var claims []claim
	for _, ms := range r.cluster.list { // who stays as it is keeps its model
		name := key(ms)
		if o := r.wanted[name]; o != nil && bytes.Equal(o.raw, ms.Object) && keep(name) {
			continue
		}
		parsed, err := r.cluster.parse(ms)
		if err != nil {
			refused = append(refused, rejected{name, shorten(err.Error())})
			keep(name)
			continue
		}
		claims = append(claims, claim{ms, name, parsed})
	}
	newcomer := func(x claim) int {
		if o := r.wanted[x.name]; o != nil && o.model.Model() == x.parsed.Model() {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(claims, func(a, b claim) int { return newcomer(a) - newcomer(b) })
	var lost []string
	for _, x := range claims {
		o := &object{name: x.name, raw: x.Object, generation: x.Generation}
		err := taken.by(x.parsed)
		if err == nil {
			err = r.start(ctx, o, x.parsed)
		}
		if err != nil {
			refused = append(refused, rejected{x.name, shorten(err.Error())})
			lost = append(lost, x.name)
			continue
		}
		wanted[x.name] = o
		taken.take(x.parsed, x.name)
	}
	for _, name := range lost { // last, since models may go round
		keep(name)
	}
	r.cluster.refuse(refused, wanted)
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
	if t := m.Spec.TLS; t.CAFile != "" || t.CertFile != "" {
		l.fault(doc, "spec.tls", "names files of the gateway's host", "leave all but serverName out")
	}
	if m.Spec.KVEvents.Listen != "" {
		l.fault(doc, "spec.kvEvents.listen", "is not allowed in a cluster's object",
			"leave it out, or write the ModelServer into the gateway's file")
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
			c.log.Warn("a ModelServer is not served as it is", "name", r.Name, "reason", r.Reason, "servedAsBefore",
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
	return slices.Clip(c.rejected), c.heard
}

// key is an object's name to operators: both API groups may have one NAMESPACE/NAME.
func key(ms kubernetes.ModelServer) string { return ms.Namespace + "/" + ms.Name + " of " + ms.Group }
