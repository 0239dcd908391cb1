// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/lab/bench/internal/cpu"
	"github.com/pdkit/pdkit/lab/bench/internal/load"
)

// program is a proxy under test, running as a process of its own.
type program struct {
	name    string
	site    site
	address string
	log     string
	cmd     *exec.Cmd
	exited  chan struct{}
	started time.Time
	ended   bool
}

// recipe says how a program is started.
type recipe struct {
	name   string
	site   site
	binary string
	args   func(ctx context.Context, listen string) ([]string, error)
	env    []string // beside the usual
	// register tells a program that has just been started of its engines; nil: its arguments do.
	register func(ctx context.Context, listen string) error
	// patience is the most that the program may need until its first response; 0: 20 s.
	patience time.Duration
}

// minimal is the proxy that the gateway is compared with. Flags make variants of it.
func (l *lab) minimal(binary, name string, extra ...string) recipe {
	args := func(_ context.Context, listen string) ([]string, error) {
		return append([]string{
			"-listen", listen,
			"-prefill", "http://" + l.engines.Prefill[0],
			"-decode", "http://" + l.engines.Decode[0],
		}, extra...), nil
	}
	return recipe{name: name, site: l.site, binary: binary, args: args}
}

// gateway is cmd/gateway with default settings and an admin address, for the given engines.
func (l *lab) gateway(binary, name string, engines *load.Engines) recipe {
	args := func(ctx context.Context, listen string) ([]string, error) {
		admin, err := freeAddress(ctx, listen)
		if err != nil {
			return nil, err
		}
		file := filepath.Join(l.dir, name+".yaml")
		if err := os.WriteFile(file, []byte(gatewayConfig(listen, admin, engines)), 0o600); err != nil {
			return nil, err
		}
		return []string{"-config", file}, nil
	}
	return recipe{name: name, site: site{board: l.board, engines: engines}, binary: binary, args: args}
}

func gatewayConfig(listen, admin string, engines *load.Engines) string {
	var y strings.Builder
	fmt.Fprintf(&y, `apiVersion: pdkit.dev/v1alpha1
kind: Gateway
spec:
  listen: %s
  admin: %s
---
apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
metadata: {name: bench, namespace: default}
spec:
  model: bench
  kvConnector: {type: nixl}
  discovery:
    static:
      endpoints:
`, listen, admin)
	for _, address := range engines.Prefill {
		fmt.Fprintf(&y, "        - {url: \"http://%s\", role: prefill}\n", address)
	}
	for _, address := range engines.Decode {
		fmt.Fprintf(&y, "        - {url: \"http://%s\", role: decode}\n", address)
	}
	return y.String()
}

// freeAddress finds a free loopback port that is not taken, an address that was found before: nobody listens there
// yet. If another process takes the port before the program does, the start fails with an error that says so.
//
// It is not on 127.0.0.1, where connections that this machine makes begin: one of them could have the port while a slow
// program starts. One that firstResponse makes could even begin at the port that it asks for, and so connect to itself.
func freeAddress(ctx context.Context, taken string) (string, error) {
	for {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp", "127.0.0.2:0")
		if err != nil {
			return "", err
		}
		address := l.Addr().String()
		if err := l.Close(); err != nil || address != taken {
			return address, err
		}
	}
}

// start runs a program on the CPU of the programs under test and returns when it has answered one request.
func (l *lab) start(ctx context.Context, r recipe) (*program, time.Duration, error) {
	listen, err := freeAddress(ctx, "")
	if err != nil {
		return nil, 0, err
	}
	args, err := r.args(ctx, listen)
	if err != nil {
		return nil, 0, err
	}
	p := &program{name: r.name, site: r.site, address: listen, exited: make(chan struct{})}
	p.log = filepath.Join(l.dir, r.name+".log")
	log, err := os.Create(p.log)
	if err != nil {
		return nil, 0, err
	}
	defer log.Close()
	p.cmd = exec.CommandContext(ctx, r.binary, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(append(slices.DeleteFunc(os.Environ(), tunesGo), "GOMAXPROCS=1"), r.env...)
	if err := l.exec(p); err != nil {
		return nil, 0, err
	}
	l.running = append(l.running, p)
	go func() {
		// ProcessState says how it ended. A program that was stopped may end with any status.
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	if r.register != nil {
		err = p.whileItRuns(ctx, func(ctx context.Context) error { return r.register(ctx, listen) })
	}
	var took time.Duration
	if err == nil {
		took, err = l.firstResponse(ctx, p, cmp.Or(r.patience, 20*time.Second))
	}
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("%s: %w%s", p.name, err, p.lastWords()), p.stop())
	}
	return p, took, nil
}

// whileItRuns calls a function whose context ends with the program, too.
func (p *program) whileItRuns(ctx context.Context, do func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := do(ctx)
	if err != nil && p.hasExited() {
		return fmt.Errorf("ended before it answered: %v", p.cmd.ProcessState)
	}
	return err
}

// tunesGo reports whether an environment variable would change how a Go program under test runs.
func tunesGo(variable string) bool {
	name, _, _ := strings.Cut(variable, "=")
	return slices.Contains([]string{"GOMAXPROCS", "GOGC", "GOMEMLIMIT", "GODEBUG", "GOTRACEBACK"}, name)
}

// exec starts the process from a thread that runs on the CPU for programs under test: the process inherits the CPU.
func (l *lab) exec(p *program) error {
	result := make(chan error)
	go func() {
		// The thread is not unlocked, so the runtime ends it with this goroutine: nothing else runs on that CPU.
		runtime.LockOSThread()
		err := cpu.PinThread(l.theirs)
		if err == nil {
			p.started = time.Now()
			err = p.cmd.Start()
		}
		result <- err
	}()
	return <-result
}

// firstResponse sends requests until the program answers one, and returns the time since the program's start.
func (l *lab) firstResponse(ctx context.Context, p *program, patience time.Duration) (time.Duration, error) {
	plan := &load.Plan{Prompt: load.NewPrompt(2<<10, false)}
	client := load.NewClient(p.site.board, 0, l.target(p), plan, &load.Meter{})
	defer client.Close()
	for {
		err := client.Ask(ctx)
		if err == nil {
			return time.Since(p.started), nil
		}
		if time.Since(p.started) > patience {
			return 0, fmt.Errorf("no response within %v: %w", patience, err)
		}
		select {
		case <-p.exited:
			return 0, fmt.Errorf("ended before it answered: %v", p.cmd.ProcessState)
		default:
		}
		if err := pause(ctx, 200*time.Microsecond); err != nil {
			return 0, err
		}
	}
}

// stop ends the process with SIGTERM, as an operator would.
func (p *program) stop() error {
	if p.ended {
		return nil
	}
	p.ended = true
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if p.exitsWithin(10 * time.Second) {
		return nil
	}
	err := p.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) { // whoever waits for its end has not run yet
		return nil
	}
	return errors.Join(fmt.Errorf("%s does not end on SIGTERM", p.name), err)
}

// lastWords returns the last lines of a program's log, to be shown when the program fails; empty for a nil program.
func (p *program) lastWords() string {
	if p == nil {
		return ""
	}
	text, err := os.ReadFile(p.log)
	if err != nil || len(text) == 0 {
		return ""
	}
	return "\n" + string(text[max(0, len(text)-2000):])
}

// usedBy returns the CPU time that a program has used so far; 0 for nil, which stands for the direct legs.
func usedBy(p *program) (time.Duration, error) {
	if p == nil {
		return 0, nil
	}
	return cpu.UsedByTree(p.cmd.Process.Pid)
}
