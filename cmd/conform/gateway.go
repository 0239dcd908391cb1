// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

// Gateway is what is tested: a *Command, a *Running, or a test's own.
type Gateway interface {
	// Start starts a gateway for these engines. It need not be ready yet.
	Start(ctx context.Context, prefill, decode []string) (*Instance, error)
	// Ready is the path that answers with 200 once the gateway is ready; "" for none.
	Ready() string
}

// Instance is a gateway at work.
type Instance struct {
	URL string
	// Stop ends it at once, with everything that Start began.
	Stop func()
	// Terminate sends SIGTERM; nil if the kit did not start a process.
	Terminate func() error
	// Exited is closed when the process has ended; ExitCode is its exit status then.
	Exited   <-chan struct{}
	ExitCode func() int
	// Log returns the end of what it has printed.
	Log func() string
}

// Command starts a gateway for each case as a process.
//
// Each word of Args, Config and Setup can have placeholders: {port} is a free port, {port2}, {port3} and so on are
// others; {config} is a file with Config; {prefill} and {decode} are the engines' URLs. What holds one of these two is
// repeated for each engine: a word (with the word before it, if that is a flag), a line of Config, a command of Setup.
type Command struct {
	Args      []string
	Config    string
	Setup     [][]string // commands to run after the start
	ReadyPath string
}

// Ready returns the path to ask.
func (c *Command) Ready() string { return c.ReadyPath }

// Start starts the process, and the commands of Setup.
func (c *Command) Start(ctx context.Context, prefill, decode []string) (*Instance, error) {
	dir, err := os.MkdirTemp("", "pdctl-conform-")
	if err != nil {
		return nil, err
	}
	f := &filler{prefill: prefill, decode: decode, words: map[string]string{"{config}": filepath.Join(dir, "config")}}
	args, config := f.args(c.Args), f.lines(c.Config)
	url := "http://127.0.0.1:" + f.fill("{port}")
	if f.err == nil {
		f.err = os.WriteFile(f.words["{config}"], []byte(config), 0o600)
	}
	if f.err != nil {
		return nil, errors.Join(f.err, os.RemoveAll(dir))
	}
	log := &tail{}
	// Its context must not end the process by itself: Stop ends the whole group.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), args[0], args[1:]...) //nolint:gosec // it is the user's
	cmd.Stdout, cmd.Stderr = log, log
	ownGroup(cmd)
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	exited := make(chan struct{})
	go func() { defer close(exited); _ = cmd.Wait() }() // the exit status is read by ExitCode
	i := &Instance{URL: url, Exited: exited, Log: log.String,
		Stop: func() {
			killGroup(cmd)
			<-exited
			_ = os.RemoveAll(dir)
		},
		Terminate: func() error { return cmd.Process.Signal(syscall.SIGTERM) },
		ExitCode:  func() int { return cmd.ProcessState.ExitCode() }}
	for _, setup := range c.Setup {
		if err := f.setup(ctx, i, setup); err != nil {
			i.Stop()
			return nil, err
		}
	}
	return i, nil
}

// filler replaces placeholders.
type filler struct {
	prefill, decode []string
	words           map[string]string
	err             error
}

var portWord = regexp.MustCompile(`\{port\d*\}|\{config\}`)

func (f *filler) fill(text string) string {
	return portWord.ReplaceAllStringFunc(text, func(word string) string {
		if f.words[word] == "" {
			port, err := freeport.One()
			f.words[word], f.err = port, errors.Join(f.err, err)
		}
		return f.words[word]
	})
}

// each fills a text, as often as it names engines.
func (f *filler) each(text string) []string {
	var all []string
	switch {
	case strings.Contains(text, "{prefill}"):
		for _, url := range f.prefill {
			all = append(all, f.fill(strings.ReplaceAll(text, "{prefill}", url)))
		}
	case strings.Contains(text, "{decode}"):
		for _, url := range f.decode {
			all = append(all, f.fill(strings.ReplaceAll(text, "{decode}", url)))
		}
	default:
		all = []string{f.fill(text)}
	}
	return all
}

func (f *filler) args(words []string) []string {
	var all []string
	before := ""
	for _, word := range words {
		for n, filled := range f.each(word) {
			if n > 0 && strings.HasPrefix(before, "-") {
				all = append(all, f.fill(before))
			}
			all = append(all, filled)
		}
		before = word
	}
	return all
}

func (f *filler) lines(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.Join(f.each(line), ""))
	}
	return b.String()
}

// setup runs a command until it ends with 0: right after the start a gateway may not listen yet.
func (f *filler) setup(ctx context.Context, i *Instance, words []string) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	const between = "\x00" // a whole command is filled at once, to be repeated as one
	for _, line := range f.each(strings.Join(words, between)) {
		args := strings.Split(line, between)
		for {
			cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // it is the user's
			out, err := cmd.CombinedOutput()
			if err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("the setup command %s fails: %w\n%s\n%s", args[0], err, out, i.Log())
			case <-i.Exited:
				return fmt.Errorf("the gateway has ended\n%s", i.Log())
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	return f.err
}

// tail keeps the end of what is written.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - 4096; over > 0 {
		t.text = append([]byte{}, t.text[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// Running is a gateway that somebody else started, or will start once the engines' addresses are known. All cases
// share it and its engines, one after another.
type Running struct {
	URL             string
	ReadyPath       string
	Prefill, Decode []string                       // addresses at which the kit's engines listen: "127.0.0.1:8100"
	Announce        func(prefill, decode []string) // is called once the engines listen
}

// Ready returns the path to ask.
func (r *Running) Ready() string { return r.ReadyPath }

// Start starts nothing.
func (r *Running) Start(_ context.Context, prefill, decode []string) (*Instance, error) {
	if r.Announce != nil {
		r.Announce(prefill, decode)
	}
	return &Instance{URL: strings.TrimRight(r.URL, "/"), Stop: func() {}, Log: func() string { return "" }}, nil
}

// scene starts the engines that all cases share.
func (r *Running) scene(ctx context.Context) (*Scene, error) { return newScene(ctx, r) }
