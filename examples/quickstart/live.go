// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

const gatewayPackage = "github.com/pdkit/pdkit/cmd/gateway"

// live is the program cmd/gateway in front of the same P and D. Its admin address has a live view.
type live struct {
	url      string // for clients
	page     string // the live view's URL
	folder   string // of the program and its configuration
	cmd      *exec.Cmd
	draining chan struct{} // closed when the program says that it drains
	ended    chan error
	last     string // line of its log, once it has ended
}

// openLive builds the program, which only works where its source is, and starts it. Until it serves, the end of ctx
// ends it.
func openLive(ctx context.Context, l *lab, connector string) (_ *live, err error) {
	v := &live{draining: make(chan struct{}), ended: make(chan error, 1)}
	if v.folder, err = os.MkdirTemp("", "quickstart"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(v.folder))
		}
	}()
	program, config := filepath.Join(v.folder, "gateway.exe"), filepath.Join(v.folder, "gateway.yaml")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, gatewayPackage) //nolint:gosec // in a new folder
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build %s: %w\n%s", gatewayPackage, err, strings.TrimSpace(string(out)))
	}
	yaml := fmt.Sprintf(`apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: %s
  kvConnector: {type: %s}
  discovery:
    static:
      endpoints:
        - {url: %q, role: prefill}
        - {url: %q, role: decode}
`, engine.Model, connector, l.prefill.URL(), l.decode.URL())
	if err := os.WriteFile(config, []byte(yaml), 0o600); err != nil {
		return nil, err
	}
	// stop ends it: the end of ctx would kill it, with the requests that run
	v.cmd = exec.CommandContext(context.WithoutCancel(ctx), program, //nolint:gosec // which was built above
		"-config", config, "-listen", "127.0.0.1:0", "-admin", "127.0.0.1:0", "-inspect", "1s")
	log, err := v.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := v.cmd.Start(); err != nil {
		return nil, err
	}
	serving := make(chan map[string]string, 1)
	go v.read(log, serving)
	select {
	case at := <-serving:
		v.url, v.page = "http://"+at["listen"], "http://"+at["admin"]+"/debug/live/"
		return v, nil
	case err := <-v.ended:
		return nil, fmt.Errorf("cmd/gateway has ended: %s: %w", v.last, err)
	case <-ctx.Done():
	}
	_ = v.cmd.Process.Kill()
	return nil, errors.Join(ctx.Err(), <-v.ended)
}

// address finds the addresses in the line of the program's log that says that it serves.
var address = regexp.MustCompile(` (listen|admin)=(\S+)`)

// read reads the program's log until it ends.
func (v *live) read(log io.Reader, serving chan<- map[string]string) {
	lines := bufio.NewScanner(log)
	draining := false
	for lines.Scan() {
		line := lines.Text()
		switch v.last = line; {
		case strings.Contains(line, "msg=serving "):
			at := map[string]string{}
			for _, found := range address.FindAllStringSubmatch(line, -1) {
				at[found[1]] = found[2]
			}
			serving <- at
		case strings.Contains(line, "msg=draining ") && !draining:
			draining = true
			close(v.draining)
		}
	}
	_, _ = io.Copy(io.Discard, log) // of a line that is too long
	v.ended <- v.cmd.Wait()
}

// stop lets the program drain, and waits for its end.
func (v *live) stop() error {
	select {
	case <-v.draining: // a terminal tells Ctrl-C both programs, and a second signal would cut what runs
	case <-time.After(300 * time.Millisecond):
		if v.cmd.Process.Signal(os.Interrupt) != nil { // it has ended, or the system has no signals
			_ = v.cmd.Process.Kill()
		}
	}
	kill := time.AfterFunc(15*time.Second, func() { _ = v.cmd.Process.Kill() })
	defer kill.Stop()
	return errors.Join(<-v.ended, os.RemoveAll(v.folder))
}

// openLive opens the live view and sends it the story's requests once more, begun in another way. It returns nil, and
// has said why, if there is no live view.
func (s *screen) openLive(ctx context.Context, l *lab, connector string) *live {
	s.printf("\nBuilding cmd/gateway, which has a live view: the first time it may take minutes.\n")
	v, err := openLive(ctx, l, connector)
	if err != nil {
		if ctx.Err() == nil {
			s.printf("There is no live view. It needs pdkit's repository and Go: %v\n", err)
		}
		return nil
	}
	for _, r := range requests {
		if _, err := ask(ctx, v.url, completion("Once more. "+r.prompt, r.stream), func(string) {}); err != nil {
			break // the live view shows it
		}
	}
	return v
}
