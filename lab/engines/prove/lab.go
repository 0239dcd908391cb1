// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/lab/internal/gateway"
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

func (o gatewayOptions) write(file, listen, admin string) error {
	kv := gateway.Object{"type": o.connector}
	switch {
	case o.config != "":
		kv["config"] = json.RawMessage(o.config)
	case o.lease > 0:
		kv["config"] = gateway.Object{"leaseDuration": o.lease.String()}
	}
	timeouts := gateway.Object{"healthCheck": "2s"}
	for name, value := range map[string]time.Duration{"connect": o.connect, "prefill": o.prefill, "handoff": o.handoff,
		"decode": o.decode} {
		if value > 0 {
			timeouts[name] = value.String()
		}
	}
	kv["timeouts"] = timeouts
	var engines []gateway.Object
	for _, e := range o.endpoints {
		engines = append(engines, gateway.Object{"url": e.URL.String(), "role": e.Role.String(),
			"attributes": e.Attributes})
	}
	spec := gateway.Object{"model": "tiny", "kvConnector": kv,
		"discovery": gateway.Static(o.prefills, o.decodes, engines...)}
	if o.encoder != "" {
		spec["encoder"] = gateway.Object{"type": o.encoder}
	}
	if o.rescue {
		spec["rescue"] = gateway.Object{"mode": "on"}
	}
	content, err := gateway.Config(listen, admin, spec)
	if err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o600)
}

// startGateway starts a gateway and waits until it has a ready pair.
func (l *lab) startGateway(ctx context.Context, o gatewayOptions) (*process, error) {
	listen, admin, err := twoPorts()
	if err != nil {
		return nil, err
	}
	listen, admin = "127.0.0.1:"+listen, "127.0.0.1:"+admin
	file := filepath.Join(l.dir, fmt.Sprintf("%02d-gateway.yaml", len(l.started)))
	if err := o.write(file, listen, admin); err != nil {
		return nil, err
	}
	//nolint:gosec // G204: as above
	cmd := exec.CommandContext(context.WithoutCancel(ctx), l.gateway, "-config", file)
	started, err := l.start(cmd, "gateway", "http://"+listen)
	if err != nil {
		return nil, err
	}
	started.config = file
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, fmt.Errorf("30 seconds were not enough"))
	defer cancel()
	return started, started.ready(ctx, "http://"+admin+"/readyz")
}

// stopGateway stops a gateway as an operator does. The gateway must drain and exit with 0.
func stopGateway(gateway *process) error {
	gateway.stop()
	if gateway.Err != nil {
		return fmt.Errorf("the gateway ended with: %w\n%s", gateway.Err, gateway.Tail())
	}
	return nil
}
