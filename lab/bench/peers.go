// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pdkit/pdkit/lab/bench/internal/load"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// peer is another project's gateway for prefill and decode. It is measured beside pdkit's, in the same slices.
type peer struct {
	name    string // of its program and of its Python package
	version string
	binary  string
	// args are its arguments besides the addresses.
	args func(engines *load.Engines) []string
	// register is as in recipe.
	register func(ctx context.Context, listen string, engines *load.Engines) error
}

// knownPeers are started as their documentation says for vLLM with the NIXL connector. All else is their default, but
// for the policy, so that all gateways choose engines alike, and for logs, so that none writes a line per request.
var knownPeers = []peer{
	{name: "vllm-router", args: vllmRouterArgs},
	{name: "smg", args: smgArgs, register: registerWithSMG},
}

func vllmRouterArgs(engines *load.Engines) []string {
	args := []string{"--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin",
		"--log-level", "warning"}
	for _, url := range urls(engines.Prefill) {
		args = append(args, "--prefill", url)
	}
	for _, url := range urls(engines.Decode) {
		args = append(args, "--decode", url)
	}
	return args
}

// smgArgs name no engines: those that are named in arguments have no connector, and smg 1.13.0 then sends prefill legs
// that do not ask for a handoff.
func smgArgs(*load.Engines) []string {
	return []string{"launch", "--pd-disaggregation", "--backend", "vllm", "--policy", "round_robin",
		"--log-level", "warn"}
}

// peerPatience is the most that a peer may need to start: with 4,096 engines that is minutes.
const peerPatience = 5 * time.Minute

// registerWithSMG adds the engines with the label kv_connector, and waits until all are ready.
func registerWithSMG(ctx context.Context, listen string, engines *load.Engines) error {
	ctx, cancel := context.WithTimeout(ctx, peerPatience)
	defer cancel()
	workers := "http://" + listen + "/workers"
	for ready(ctx, workers) < 0 {
		if err := proc.Pause(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("%s does not listen", listen)
		}
	}
	add := func(address, role string) error {
		body, err := json.Marshal(map[string]any{
			"url": "http://" + address, "worker_type": role, "runtime_type": "vllm",
			"labels": map[string]string{"kv_connector": "NixlConnector"},
		})
		if err != nil {
			return err
		}
		_, err = call(ctx, http.MethodPost, workers, body)
		return err
	}
	for _, address := range engines.Prefill {
		if err := add(address, "prefill"); err != nil {
			return err
		}
	}
	for _, address := range engines.Decode {
		if err := add(address, "decode"); err != nil {
			return err
		}
	}
	all := len(engines.Prefill) + len(engines.Decode)
	for ready(ctx, workers) < all {
		if err := proc.Pause(ctx, 20*time.Millisecond); err != nil {
			n := ready(context.WithoutCancel(ctx), workers)
			return fmt.Errorf("%d of %d workers are ready after %v", n, all, peerPatience)
		}
	}
	return nil
}

// ready returns how many workers smg calls ready, -1 if it does not answer.
func ready(ctx context.Context, workers string) int {
	text, err := call(ctx, http.MethodGet, workers, nil)
	if err != nil {
		return -1
	}
	var list struct {
		Workers []struct{ Status string }
	}
	if json.Unmarshal(text, &list) != nil {
		return -1
	}
	n := 0
	for _, w := range list.Workers {
		if w.Status == "ready" {
			n++
		}
	}
	return n
}

func call(ctx context.Context, method, url string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %.200s", method, r.URL.Path, res.Status, text)
	}
	return text, err
}

// findPeers returns the known peers that are installed in dir, a virtual environment of Python.
func findPeers(dir string) ([]peer, error) {
	if dir == "" {
		return nil, nil
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	var found []peer
	for _, p := range knownPeers {
		p.binary = filepath.Join(dir, "bin", p.name)
		if _, err := os.Stat(p.binary); err != nil {
			continue
		}
		p.version = installedVersion(dir, p.name)
		found = append(found, p)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no peers in %s: lab/bench/peers/install.sh installs them", dir)
	}
	return found, nil
}

// installedVersion reads a package's version from the folder that pip has made for it; "?" if there is none.
func installedVersion(dir, name string) string {
	prefix := strings.ReplaceAll(name, "-", "_") + "-"
	pattern := filepath.Join(dir, "lib", "python*", "site-packages", prefix+"*.dist-info")
	list, _ := filepath.Glob(pattern) // the pattern is well formed
	if len(list) != 1 {
		return "?"
	}
	return strings.TrimSuffix(strings.TrimPrefix(filepath.Base(list[0]), prefix), ".dist-info")
}

func (p peer) title() string { return p.name + " " + p.version }

// recipe says how the peer is started for the engines of a site.
func (p peer) recipe(s site) recipe {
	r := recipe{name: p.title(), site: s, binary: p.binary, patience: peerPatience}
	r.args = func(listen string) ([]string, error) {
		metrics, err := freeAddress()
		if err != nil {
			return nil, err
		}
		args := p.args(s.engines)
		for _, a := range []struct{ flag, address string }{{"", listen}, {"prometheus-", metrics}} {
			host, port, err := net.SplitHostPort(a.address)
			if err != nil {
				return nil, err
			}
			args = append(args, "--"+a.flag+"host", host, "--"+a.flag+"port", port)
		}
		return args, nil
	}
	if p.register != nil {
		r.register = func(ctx context.Context, listen string) error { return p.register(ctx, listen, s.engines) }
	}
	return r
}
