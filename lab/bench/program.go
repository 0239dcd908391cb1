// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/lab/bench/internal/cpu"
	"github.com/pdkit/pdkit/lab/bench/internal/load"
	"github.com/pdkit/pdkit/lab/internal/gateway"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// program is a proxy under test, running as a process of its own.
type program struct {
	*proc.Process
	site    site
	address string
	started time.Time
}

// recipe says how a program is started.
type recipe struct {
	name   string
	site   site
	binary string
	args   func(listen string) ([]string, error)
	env    []string // beside the usual
	// register tells a program that has just been started of its engines; nil: its arguments do.
	register func(ctx context.Context, listen string) error
	// patience is the most that the program may need until its first response; 0: 20 s.
	patience time.Duration
}

// minimal is the proxy that the gateway is compared with. Flags make variants of it.
func (l *lab) minimal(binary, name string, extra ...string) recipe {
	args := func(listen string) ([]string, error) {
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
	args := func(listen string) ([]string, error) {
		admin, err := freeAddress()
		if err != nil {
			return nil, err
		}
		file := filepath.Join(l.dir, name+".yaml")
		content, err := gatewayConfig(listen, admin, engines)
		if err != nil {
			return nil, err
		}
		return []string{"-config", file}, os.WriteFile(file, content, 0o600)
	}
	return recipe{name: name, site: site{board: l.board, engines: engines}, binary: binary, args: args}
}

func gatewayConfig(listen, admin string, engines *load.Engines) ([]byte, error) {
	return gateway.Config(listen, admin, gateway.Object{"model": "bench", "kvConnector": gateway.Object{"type": "nixl"},
		"discovery": gateway.Static(urls(engines.Prefill), urls(engines.Decode))})
}

func urls(addresses []string) (list []string) {
	for _, address := range addresses {
		list = append(list, "http://"+address)
	}
	return list
}

// freeAddress finds a loopback address at which nobody listens, and no connection of this machine begins.
func freeAddress() (string, error) {
	port, err := freeport.One()
	return "127.0.0.1:" + port, err
}

// start runs a program on the CPU of the programs under test and returns when it has answered one request.
func (l *lab) start(ctx context.Context, r recipe) (*program, time.Duration, error) {
	listen, err := freeAddress()
	if err != nil {
		return nil, 0, err
	}
	args, err := r.args(listen)
	if err != nil {
		return nil, 0, err
	}
	p := &program{site: r.site, address: listen}
	cmd := exec.CommandContext(ctx, r.binary, args...)
	cmd.Env = append(append(slices.DeleteFunc(os.Environ(), tunesGo), "GOMAXPROCS=1"), r.env...)
	p.Process, err = proc.Start(cmd, r.name, filepath.Join(l.dir, r.name+".log"), func(cmd *exec.Cmd) error {
		return l.exec(p, cmd)
	})
	if err != nil {
		return nil, 0, err
	}
	l.running = append(l.running, p)
	if r.register != nil {
		err = p.whileItRuns(ctx, func(ctx context.Context) error { return r.register(ctx, listen) })
	}
	var took time.Duration
	if err == nil {
		took, err = l.firstResponse(ctx, p, cmp.Or(r.patience, 20*time.Second))
	}
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("%s: %w%s", p.Name, err, p.lastWords()), p.stop())
	}
	return p, took, nil
}

// whileItRuns calls a function whose context ends with the program, too.
func (p *program) whileItRuns(ctx context.Context, do func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-p.Done:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := do(ctx)
	if err != nil && p.Ended() {
		return fmt.Errorf("ended before it answered: %v", p.Cmd.ProcessState)
	}
	return err
}

// tunesGo reports whether an environment variable would change how a Go program under test runs.
func tunesGo(variable string) bool {
	name, _, _ := strings.Cut(variable, "=")
	return slices.Contains([]string{"GOMAXPROCS", "GOGC", "GOMEMLIMIT", "GODEBUG", "GOTRACEBACK"}, name)
}

// exec starts the process from a thread that runs on the CPU for programs under test: the process inherits the CPU.
func (l *lab) exec(p *program, cmd *exec.Cmd) error {
	result := make(chan error)
	go func() {
		// The thread is not unlocked, so the runtime ends it with this goroutine: nothing else runs on that CPU.
		runtime.LockOSThread()
		err := cpu.PinThread(l.theirs)
		if err == nil {
			p.started = time.Now()
			err = cmd.Start()
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
		case <-p.Done:
			return 0, fmt.Errorf("ended before it answered: %v", p.Cmd.ProcessState)
		default:
		}
		if err := proc.Pause(ctx, 200*time.Microsecond); err != nil {
			return 0, err
		}
	}
}

// stop ends the process with SIGTERM, as an operator would. It may end with any status.
func (p *program) stop() error {
	if p.Ended() || p.Stop(10*time.Second) {
		return nil
	}
	return fmt.Errorf("%s does not end on SIGTERM", p.Name)
}

// lastWords returns the last lines of a program's log, to be shown when the program fails; empty for a nil program.
func (p *program) lastWords() string {
	if p == nil {
		return ""
	}
	return "\n" + p.Tail()
}

// usedBy returns the CPU time that a program has used so far; 0 for nil, which stands for the direct legs.
func usedBy(p *program) (time.Duration, error) {
	if p == nil {
		return 0, nil
	}
	return cpu.UsedByTree(p.Cmd.Process.Pid)
}
