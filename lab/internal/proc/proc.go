// SPDX-License-Identifier: Apache-2.0

// Package proc runs the programs that the laboratory measures and proves: gateways, engines and what they need.
package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Process is a program that this one has started. It has a process group of its own, so that it and its children get
// every signal together.
type Process struct {
	Name string
	Cmd  *exec.Cmd
	Log  string        // the file with its output
	Done chan struct{} // closed once the process has ended
	Err  error         // how it ended; read it after Done
}

// Start starts a command, whose output goes to a file. start is how: (*exec.Cmd).Start, or the same from a thread with
// a CPU or a network of its own.
func Start(cmd *exec.Cmd, name, log string, start func(*exec.Cmd) error) (*Process, error) {
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := start(cmd); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	p := &Process{Name: name, Cmd: cmd, Log: log, Done: make(chan struct{})}
	go func() {
		p.Err = cmd.Wait()
		close(p.Done)
	}()
	return p, nil
}

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.Done:
		return true
	default:
		return false
	}
}

// EndsWithin waits for the process's end.
func (p *Process) EndsWithin(patience time.Duration) bool {
	select {
	case <-p.Done:
		return true
	case <-time.After(patience):
		return p.Ended()
	}
}

// Until waits until ok reports true, as long as the process runs and ctx lasts. It asks every interval.
func (p *Process) Until(ctx context.Context, interval time.Duration, ok func() bool) error {
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not get ready: %w\n%s", p.Name, context.Cause(ctx), p.Tail())
		case <-p.Done:
			return fmt.Errorf("%s ended while starting: %w\n%s", p.Name, errors.Join(p.Err), p.Tail())
		case <-time.After(interval):
		}
	}
	return nil
}

// Signal sends a signal to the process and its children.
func (p *Process) Signal(sig syscall.Signal) error {
	if p.Ended() {
		return fmt.Errorf("%s has ended already: %w", p.Name, errors.Join(p.Err))
	}
	return syscall.Kill(-p.Cmd.Process.Pid, sig)
}

// Kill ends the process as a crash would, and waits for its end.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.Done
	return nil
}

// Stop asks the process to end, and kills it if it does not within its patience. It leaves none of its children. It
// reports whether the process ended by itself.
func (p *Process) Stop(patience time.Duration) bool {
	_ = p.Signal(syscall.SIGCONT) // it may have ended
	_ = p.Signal(syscall.SIGTERM)
	ended := p.EndsWithin(patience)
	_ = syscall.Kill(-p.Cmd.Process.Pid, syscall.SIGKILL)
	<-p.Done
	return ended
}

// Tail is the end of the process's output, for the reader.
func (p *Process) Tail() string {
	content, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(content), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-20):], []byte("\n")))
}

// Build compiles a program of this repository into a folder.
func Build(ctx context.Context, dir, pkg string) (string, error) {
	binary := filepath.Join(dir, filepath.Base(pkg))
	cmd := exec.CommandContext(ctx, "go", "build", "-o", binary, pkg) //nolint:gosec // only the folder varies
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", pkg, err, text)
	}
	return binary, nil
}

// Gateway is the package that most programs of the laboratory build.
const Gateway = "github.com/pdkit/pdkit/cmd/gateway"

// Pause sleeps for d, or until ctx ends.
func Pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
