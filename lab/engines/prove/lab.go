// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// lab starts the engines and gateways of one run, and stops those that still run at the end.
type lab struct {
	script, gateway string // the programs that start an engine and a gateway
	dir             string // logs and configurations
	reaper          *reaper
	started         []*process
}

func (l *lab) close() {
	for _, p := range l.started {
		p.stop()
	}
	l.reaper.close()
}

func (l *lab) start(cmd *exec.Cmd, name, url string) (*process, error) {
	log := filepath.Join(l.dir, fmt.Sprintf("%02d-%s.log", len(l.started), name))
	started, err := proc.Start(cmd, name, log, (*exec.Cmd).Start)
	if err != nil {
		return nil, err
	}
	p := &process{Process: started, url: url}
	l.started = append(l.started, p)
	return p, l.reaper.watch(p)
}

// twoPorts are free ports: of an engine and of its side channel, or of a gateway and of its admin server.
func twoPorts() (one, other string, err error) {
	first, err := freeport.Find(2)
	return strconv.Itoa(first), strconv.Itoa(first + 1), err
}

type engineOptions struct {
	script string // "" means the lab's
	role   string
	port   string        // "" means a free one
	side   string        // port of the side channel; "" means a free one
	more   []string      // further arguments of the script
	folder string        // in which the engine runs; "" is this program's
	lease  time.Duration // whole seconds; 0: the engine's default
	blocks int           // size of the KV cache; 0: engine.sh's default
}

// blockBytes is the size of a block of 32 tokens of the tiny model: keys and values, 2 layers, 2 heads of 32 floats.
const blockBytes = 2 * 2 * 2 * 32 * 4 * 32

// startEngines starts several engines at once and waits until all are ready.
func (l *lab) startEngines(ctx context.Context, wanted ...engineOptions) ([]*process, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 5*time.Minute, fmt.Errorf("5 minutes were not enough"))
	defer cancel()
	var engines []*process
	for _, o := range wanted {
		free, side, err := twoPorts()
		if err != nil {
			return nil, err
		}
		port, side := cmp.Or(o.port, free), cmp.Or(o.side, side)
		//nolint:gosec // G204: the script is the caller's choice, as the program's flag says
		cmd := exec.CommandContext(context.WithoutCancel(ctx), cmp.Or(o.script, l.script), o.role, port, side)
		cmd.Args = append(cmd.Args, o.more...)
		if o.blocks > 0 {
			cmd.Args = append(cmd.Args, "--kv-cache-memory-bytes", strconv.Itoa(o.blocks*blockBytes))
		}
		cmd.Env, cmd.Dir = os.Environ(), o.folder
		if o.lease > 0 {
			cmd.Env = append(cmd.Env, fmt.Sprintf("PDKIT_LEASE=%d", int(o.lease.Seconds())))
		}
		engine, err := l.start(cmd, o.role, fmt.Sprintf("http://127.0.0.1:%s", port))
		if err != nil {
			return nil, err
		}
		engines = append(engines, engine)
	}
	for _, engine := range engines {
		if err := engine.ready(ctx, engine.url+"/health"); err != nil {
			return nil, err
		}
	}
	return engines, nil
}

// gatewayOptions is the content of the gateway's configuration. A zero duration is left out, so the gateway uses its
// default.
type gatewayOptions struct {
	connector                         string
	config                            string   // of the connector, JSON
	encoder                           string   // type of the encode stage; "" means none
	rescue                            bool     // streams outlive their decode engine
	prefills, decodes                 []string // URLs
	endpoints                         []discovery.Endpoint
	lease                             time.Duration
	connect, prefill, handoff, decode time.Duration
}

func (o gatewayOptions) yaml(listen, admin string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: pdkit.dev/v1alpha1
kind: Gateway
spec:
  listen: %q
  admin: %q
---
apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
metadata: {name: tiny}
spec:
  model: tiny
  kvConnector:
    type: %s
`, listen, admin, o.connector)
	switch {
	case o.config != "":
		fmt.Fprintf(&b, "    config: %s\n", o.config)
	case o.lease > 0:
		fmt.Fprintf(&b, "    config: {leaseDuration: %s}\n", o.lease)
	}
	b.WriteString("    timeouts:\n      healthCheck: 2s\n")
	for _, timeout := range []struct {
		name  string
		value time.Duration
	}{{"connect", o.connect}, {"prefill", o.prefill}, {"handoff", o.handoff}, {"decode", o.decode}} {
		if timeout.value > 0 {
			fmt.Fprintf(&b, "      %s: %s\n", timeout.name, timeout.value)
		}
	}
	if o.encoder != "" {
		fmt.Fprintf(&b, "  encoder: {type: %s}\n", o.encoder)
	}
	if o.rescue {
		b.WriteString("  rescue: {mode: on}\n")
	}
	b.WriteString("  discovery:\n    static:\n      endpoints:\n")
	for _, url := range o.prefills {
		fmt.Fprintf(&b, "        - {url: %q, role: prefill}\n", url)
	}
	for _, url := range o.decodes {
		fmt.Fprintf(&b, "        - {url: %q, role: decode}\n", url)
	}
	for _, e := range o.endpoints {
		fmt.Fprintf(&b, "        - {url: %q, role: %s, attributes: {", e.URL, e.Role)
		for _, name := range slices.Sorted(maps.Keys(e.Attributes)) {
			fmt.Fprintf(&b, "%s: %q, ", name, e.Attributes[name])
		}
		b.WriteString("}}\n")
	}
	return b.String()
}

// startGateway starts a gateway and waits until it has a ready pair.
func (l *lab) startGateway(ctx context.Context, o gatewayOptions) (*process, error) {
	listen, admin, err := twoPorts()
	if err != nil {
		return nil, err
	}
	listen, admin = "127.0.0.1:"+listen, "127.0.0.1:"+admin
	file := filepath.Join(l.dir, fmt.Sprintf("%02d-gateway.yaml", len(l.started)))
	if err := os.WriteFile(file, []byte(o.yaml(listen, admin)), 0o600); err != nil {
		return nil, err
	}
	//nolint:gosec // G204: as above
	cmd := exec.CommandContext(context.WithoutCancel(ctx), l.gateway, "-config", file)
	gateway, err := l.start(cmd, "gateway", "http://"+listen)
	if err != nil {
		return nil, err
	}
	gateway.config = file
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, fmt.Errorf("30 seconds were not enough"))
	defer cancel()
	return gateway, gateway.ready(ctx, "http://"+admin+"/readyz")
}

// stopGateway stops a gateway as an operator does. The gateway must drain and exit with 0.
func stopGateway(gateway *process) error {
	gateway.stop()
	if gateway.Err != nil {
		return fmt.Errorf("the gateway ended with: %w\n%s", gateway.Err, gateway.Tail())
	}
	return nil
}
