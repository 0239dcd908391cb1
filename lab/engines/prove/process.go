// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// process is a server that this program runs: an engine or the gateway. Its output goes to a file.
type process struct {
	name, url, log string
	config         string // a gateway's file
	cmd            *exec.Cmd
	done           chan struct{} // closed once the process has ended
	err            error         // how it ended; read it after done
}

func startProcess(cmd *exec.Cmd, name, url, log string) (*process, error) {
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	// It gets a process group of its own, so that an engine and its children get every signal together.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	p := &process{name: name, url: url, log: log, cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// ready waits until GET url answers 200.
func (p *process) ready(ctx context.Context, url string) error {
	return p.until(ctx, func() bool { return answersOK(ctx, url) })
}

// until waits until ok reports true.
func (p *process) until(ctx context.Context, ok func() bool) error {
	for {
		if ok() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not get ready: %w\n%s", p.name, context.Cause(ctx), p.tail())
		case <-p.done:
			return fmt.Errorf("%s ended while starting: %w\n%s", p.name, errors.Join(p.err), p.tail())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func answersOK(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	response, err := plain.Do(request)
	if err != nil {
		return false
	}
	_ = response.Body.Close()
	return response.StatusCode == http.StatusOK
}

func (p *process) signal(sig syscall.Signal) error {
	if p.ended() {
		return fmt.Errorf("%s has ended already: %w", p.name, errors.Join(p.err))
	}
	return syscall.Kill(-p.cmd.Process.Pid, sig)
}

// terminate sends SIGTERM to the process alone and not to its children, as a container runtime does.
func (p *process) terminate() error { return p.cmd.Process.Signal(syscall.SIGTERM) }

// kill ends the process as a crash would, and waits for its end.
func (p *process) kill() error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

// stop asks the process to end, and kills it if it does not. It leaves none of its children.
func (p *process) stop() {
	group := -p.cmd.Process.Pid
	if !p.ended() {
		_ = syscall.Kill(group, syscall.SIGCONT)
		_ = syscall.Kill(group, syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(8 * time.Second):
		}
	}
	_ = syscall.Kill(group, syscall.SIGKILL)
	<-p.done
}

// tail is the end of the process's output, for the reader.
func (p *process) tail() string {
	content, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(content), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-20):], []byte("\n")))
}

// freePort finds a port on which nobody listens.
func freePort() (string, error) {
	listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return "", err
	}
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	return port, err
}
