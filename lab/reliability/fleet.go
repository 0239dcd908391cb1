// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/lab/internal/gateway"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

const (
	prefill = "prefill"
	decode  = "decode"
)

var errNoNamespace = errors.New("no network namespace can be had here")

// fleet is a gateway process with the engines of several orders behind it, each a process, and for each order an engine
// in this process that serves alone.
type fleet struct {
	dir     string
	wire    *wire // nil: all on loopback, and no fault of the network
	models  []*model
	client  *http.Client // to the gateway and the lone engines
	gateway *proc.Process
	url     string
	admin   string

	patience time.Duration // of a client, for a whole response
	decides  bool          // see fleetOptions
}

// model is an order at work.
type model struct {
	*order
	dir     string
	engines []*engine // prefill first, then decode
	lone    *enginesim.Engine

	listing sync.Mutex // the list of discovery is written by one at a time
	flaps   sync.Mutex // held while a fault is played at the list or at the store

	terminated atomic.Int64 // when an engine was last told to end, in ns since 1970
}

// fleetOptions say what a fleet is for.
type fleetOptions struct {
	wire   bool
	orders func(callback string) []*order
	each   int // engines of each role and order
	tune   func(o *order, cfg *enginesim.Config)
	retry  int            // attempts at a pair
	limits gateway.Object // timeouts
	// requests stay at decode where that is predicted to be faster, and the engines' KV-cache events choose pairs
	decides bool
}

// shortTimeouts let an engine that is gone be left within seconds.
var shortTimeouts = gateway.Object{"connect": "1s", "prefill": "4s", "handoff": "3s", "decode": "6s", "idle": "4s",
	"cleanup": "2s", "healthCheck": "1s"}

// patience is how long a client waits for a whole response. It is beyond what those timeouts of all attempts come to.
const patience = 60 * time.Second

// openFleet starts everything, and returns when the gateway is ready.
func openFleet(ctx context.Context, opt fleetOptions) (f *fleet, err error) {
	if opt.limits == nil {
		opt.limits = shortTimeouts
	}
	f = &fleet{patience: patience, decides: opt.decides,
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true,
			IdleConnTimeout: 4 * time.Second}}} // less than the 5 s after which the lone engines close
	if f.dir, err = os.MkdirTemp("", "pdkit-reliability-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	here, prefix := "127.0.0.1", fmt.Sprintf("127.77.%d.", 1+rand.IntN(250))
	if opt.wire {
		if f.wire, err = newWire(); err != nil {
			return nil, err
		}
		here, prefix = wirePrefix+"1", wirePrefix
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	callback, err := freeport.One()
	if err != nil {
		return nil, err
	}
	number := 2
	for _, o := range opt.orders(net.JoinHostPort(here, callback)) {
		m := &model{order: o, dir: filepath.Join(f.dir, o.name)}
		o.publishes = opt.decides
		f.models = append(f.models, m)
		if err := os.Mkdir(m.dir, 0o750); err != nil {
			return nil, err
		}
		for i := range 2 * opt.each {
			e := &engine{name: fmt.Sprintf("%s-%d", o.name, i), role: prefill, self: self}
			if i >= opt.each {
				e.role = decode
			}
			e.config = o.engineConfig(e.role, prefix+strconv.Itoa(number), m.dir, 0)
			if opt.tune != nil {
				opt.tune(o, &e.config)
			}
			if f.wire != nil {
				if e.host, err = f.wire.host(number); err != nil {
					return nil, err
				}
			}
			number++
			if err := e.start(); err != nil {
				return nil, err
			}
			m.engines = append(m.engines, e)
		}
		if m.lone, err = enginesim.Start(o.loneConfig()); err != nil {
			return nil, err
		}
		if err := m.list(m.engines); err != nil {
			return nil, err
		}
	}
	return f, f.startGateway(ctx, opt)
}

// list writes the model's list of discovery.
func (m *model) list(engines []*engine) error {
	var y strings.Builder
	y.WriteString("endpoints:\n")
	if len(engines) == 0 {
		y.WriteString("  []\n")
	}
	for _, e := range engines {
		fmt.Fprintf(&y, "  - {url: %q, role: %s, attributes: {%s}}\n", e.url(), e.role, m.attributes(e))
	}
	return m.write(y.String())
}

// write replaces the file of discovery.
func (m *model) write(list string) error {
	m.listing.Lock()
	defer m.listing.Unlock()
	path := filepath.Join(m.dir, "endpoints.yaml")
	if err := os.WriteFile(path+".new", []byte(list), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (f *fleet) configuration(opt fleetOptions, listen, admin string) ([]byte, error) {
	var servers []gateway.Object
	for _, m := range f.models {
		server := gateway.Object{"model": m.name,
			"kvConnector": gateway.Object{"type": m.name, "config": m.settings, "timeouts": opt.limits,
				"retry": gateway.Object{"maxAttempts": opt.retry}},
			"discovery": gateway.Object{"file": gateway.Object{"path": filepath.Join(m.dir, "endpoints.yaml")}}}
		if f.decides {
			server["decision"] = gateway.Object{"mode": "predicted"}
			server["kvEvents"] = gateway.Object{"mode": "ask", "tokens": "engines"}
		}
		servers = append(servers, server)
	}
	return gateway.Config(listen, admin, servers...)
}

// startGateway builds and starts the real gateway, and waits until all of its models are ready.
func (f *fleet) startGateway(ctx context.Context, opt fleetOptions) error {
	binary, err := proc.Build(ctx, f.dir, proc.Gateway)
	if err != nil {
		return err
	}
	first, err := freeport.Find(2)
	if err != nil {
		return err
	}
	listen, admin := join("127.0.0.1", first), join("127.0.0.1", first+1)
	file := filepath.Join(f.dir, "gateway.yaml")
	content, err := f.configuration(opt, listen, admin)
	if err == nil {
		err = os.WriteFile(file, content, 0o600)
	}
	if err != nil {
		return err
	}
	args := []string{"-config", file}
	if f.decides {
		args = append(args, "-pick", "kv")
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), binary, args...) // #nosec G204 -- built above
	// Go's own target for garbage: the gateway's default has a floor under the heap, which hides what grows.
	cmd.Env = append(os.Environ(), "GOGC=100")
	f.url, f.admin = "http://"+listen, "http://"+admin
	if f.gateway, err = proc.Start(cmd, "gateway", filepath.Join(f.dir, "gateway.log"), (*exec.Cmd).Start); err != nil {
		return err
	}
	if err := f.ready(ctx, 20*time.Second); err != nil {
		return fmt.Errorf("%w\n%s", err, f.gateway.Tail())
	}
	return nil
}

// ready waits until the gateway says that each model can be served.
func (f *fleet) ready(ctx context.Context, limit time.Duration) error {
	return eventually(ctx, limit, "the gateway is not ready", func() error {
		status, body, err := f.get(ctx, "/readyz")
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("/readyz: %d %s", status, body)
		}
		return err
	})
}

// eventually waits until check gives no error.
func eventually(ctx context.Context, limit time.Duration, what string, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		if proc.Pause(ctx, 50*time.Millisecond) != nil {
			return fmt.Errorf("%s after %s: %w", what, limit, err)
		}
	}
}

// get asks the gateway's admin address.
func (f *fleet) get(ctx context.Context, path string) (status int, body string, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, f.admin+path, nil)
	if err != nil {
		return 0, "", err
	}
	r.Close = true
	resp, err := f.client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// gauges are what the gateway's process holds.
type gauges struct {
	goroutines, descriptors int
	heap, resident          int64 // bytes
	sessions                int
}

// grown is an error if there are more goroutines or descriptors than before.
func (g gauges) grown(before gauges) error {
	if g.goroutines > before.goroutines+slack || g.descriptors > before.descriptors+slack {
		return fmt.Errorf("the gateway holds %+v, before %+v", g, before)
	}
	return nil
}

// gauges reads them from /metrics and /debug/pd.
func (f *fleet) gauges(ctx context.Context) (g gauges, err error) {
	f.client.CloseIdleConnections() // or else each is a goroutine and a descriptor of the gateway
	_, metrics, err := f.get(ctx, "/metrics")
	if err != nil {
		return g, err
	}
	value := func(name string) int64 {
		_, rest, _ := strings.Cut("\n"+metrics, "\n"+name+" ")
		line, _, _ := strings.Cut(rest, "\n")
		v, perr := strconv.ParseFloat(line, 64)
		if perr != nil {
			err = errors.Join(err, fmt.Errorf("/metrics has no %s", name))
		}
		return int64(v)
	}
	g.goroutines, g.descriptors = int(value("go_goroutines")), int(value("process_open_fds"))
	g.heap, g.resident = value("go_memstats_heap_inuse_bytes"), value("process_resident_memory_bytes")
	_, text, derr := f.get(ctx, "/debug/pd")
	var debug struct {
		Models []struct{ Sessions []json.RawMessage }
	}
	err = errors.Join(err, derr)
	if derr == nil {
		err = errors.Join(err, json.Unmarshal([]byte(text), &debug))
	}
	for _, m := range debug.Models {
		g.sessions += len(m.Sessions)
	}
	return g, err
}

// close ends all processes.
func (f *fleet) close() {
	if f.gateway != nil {
		f.gateway.Stop(40 * time.Second)
	}
	for _, m := range f.models {
		for _, e := range m.engines {
			e.signal(syscall.SIGKILL)
		}
		if m.lone != nil {
			_ = m.lone.Close()
		}
	}
	if f.wire != nil {
		f.wire.close()
	}
	f.client.CloseIdleConnections()
	_ = os.RemoveAll(f.dir)
}

func (e *engine) addr() netip.Addr { return e.host.addr }
