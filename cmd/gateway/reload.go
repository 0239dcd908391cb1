// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery/file"
)

// reloading is what became of the last reading of the configuration file.
type reloading struct {
	mu    sync.Mutex
	state reloaded
}

// reloaded is what /debug/pd says of the configuration.
type reloaded struct {
	LoadedAt time.Time `json:"loadedAt"`        // when the configuration that is served was read
	Error    string    `json:"error,omitempty"` // of the last reading, which changed nothing
}

func (r *reloading) done(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.state.Error = shorten(err.Error())
		return
	}
	r.state = reloaded{LoadedAt: time.Now().UTC()}
}

func (r *reloading) get() reloaded {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// followFile serves the configuration file's content whenever it changes, and when told of a SIGHUP, until ctx ends.
// read reads a content as the program's start does.
func (g *gateway) followFile(ctx context.Context, read func([]byte) (*configuration, error), hup <-chan struct{}) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	first := g.cfg.Load()
	changed := make(chan content)
	ended := make(chan struct{})
	defer func() { <-ended }()
	defer stop()
	go func() {
		defer close(ended)
		for data, err := range file.Contents(ctx, first.file, nil) {
			select {
			case changed <- content{data, err}:
			case <-ctx.Done():
			}
		}
	}()
	last := content{data: first.content}
	for {
		var now content
		select {
		case <-ctx.Done():
			return
		case now = <-changed:
			if now.same(last) {
				continue
			}
		case <-hup:
			for data, err := range file.Contents(ctx, first.file, nil) {
				now = content{data, err}
				break
			}
		}
		if ctx.Err() != nil {
			return
		}
		last = now
		g.reload(first.file, now, read)
	}
}

// content is what the configuration file had, or why it could not be read.
type content struct {
	data []byte
	err  error
}

func (c content) same(other content) bool {
	if c.err != nil || other.err != nil {
		return c.err != nil && other.err != nil && c.err.Error() == other.err.Error()
	}
	return bytes.Equal(c.data, other.data)
}

// reload serves another content of the configuration file, or logs why it does not.
func (g *gateway) reload(name string, c content, read func([]byte) (*configuration, error)) {
	var cfg *configuration
	var err error
	if c.err != nil {
		err = wholeFile(name, c.err.Error(), "restore it")
	} else if cfg, err = read(c.data); err == nil {
		err = g.replace(cfg)
	}
	g.reloading.done(err)
	if err == nil {
		g.log.Info("the configuration is reloaded", "models", len(g.models()))
		return
	}
	faults := []error{err}
	if list, ok := errors.AsType[yamlfile.Faults](err); ok {
		faults = nil
		for _, f := range list[:min(len(list), maxFaults)] {
			faults = append(faults, f)
		}
	}
	for _, fault := range faults {
		g.log.Error("the configuration is not reloaded, and nothing has changed", "fault", fault)
	}
}

// replace serves another configuration. With an error nothing has changed.
func (g *gateway) replace(cfg *configuration) error {
	before := g.cfg.Load()
	var secure *tls.Config
	if before.gateway.TLS != nil && cfg.gateway.TLS != nil {
		var err error
		if secure, err = cfg.serverTLS(); err != nil {
			return err
		}
	}
	spec := before.gateway.reloaded(cfg.gateway)
	other, err := g.passthrough(spec)
	if err != nil {
		return err
	}
	if err := g.modelSet.replace(cfg); err != nil {
		return err
	}
	if names := before.gateway.needRestart(cfg.gateway); len(names) > 0 {
		g.log.Warn("a change needs a restart", "fields", strings.Join(names, ", "))
	}
	if secure != nil {
		g.secure.Store(secure)
	}
	cfg.gateway = spec
	g.cfg.Store(cfg)
	g.other.Store(other)
	for _, n := range cfg.notes {
		if !slices.ContainsFunc(before.notes, func(old note) bool { return old.String() == n.String() }) {
			n.log(g.log)
		}
	}
	return nil
}

// needRestart returns the fields that differ in next and hold only from the program's start.
func (g gatewaySpec) needRestart(next gatewaySpec) (fields []string) {
	for _, f := range []struct {
		name string
		same bool
	}{
		{"spec.listen", g.Listen == next.Listen}, {"spec.admin", g.Admin == next.Admin},
		{"spec.maxBodyBytes", g.MaxBodyBytes == next.MaxBodyBytes},
		{"spec.forwardHeaders", slices.Equal(g.ForwardHeaders, next.ForwardHeaders)},
		{"spec.tls", (g.TLS == nil) == (next.TLS == nil)},
		{"spec.registrationTokenFile", g.RegistrationTokenFile == next.RegistrationTokenFile},
		{"spec.modelServers", reflect.DeepEqual(g.ModelServers, next.ModelServers)},
	} {
		if !f.same {
			fields = append(fields, f.name)
		}
	}
	return fields
}

// reloaded returns g with what may change while the program runs.
func (g gatewaySpec) reloaded(next gatewaySpec) gatewaySpec {
	g.DrainTimeout, g.Passthrough, g.PassthroughPaths = next.DrainTimeout, next.Passthrough, next.PassthroughPaths
	if g.TLS != nil && next.TLS != nil {
		g.TLS = next.TLS
	}
	return g
}
