// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// engine is an engine that publishes its events, and can be killed and started again under the same addresses.
type engine interface {
	URL() string
	KVEvents() (events, replay string) // HOST:PORT
	Kill()
	Restart() error // returns when it serves
	Close() error
}

// vllm is a real engine, run by lab/engines/engine.sh.
type vllm struct {
	http, events, replay string
	dir                  string
	args                 []string
	process              *proc.Process
}

// startVLLM starts a real engine on a CPU, whose KV memory is small, so that blocks are evicted.
func startVLLM(dir string, kib, steps int) (*vllm, error) {
	var ports []string
	for range 4 {
		port, err := freeport.Find(1)
		if err != nil {
			return nil, err
		}
		ports = append(ports, strconv.Itoa(port))
	}
	v := &vllm{http: "127.0.0.1:" + ports[0], events: "127.0.0.1:" + ports[1], replay: "127.0.0.1:" + ports[2],
		dir: dir}
	events := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%s",`+
		`"replay_endpoint":"tcp://*:%s","hwm":%d,"buffer_steps":%d}`, ports[1], ports[2], highWater, steps)
	v.args = []string{"lab/engines/engine.sh", "encode", ports[0], ports[3], "VLLM_SERVER_DEV_MODE=1",
		"--kv-events-config", events, "--block-size", strconv.Itoa(vllmBlock),
		"--kv-cache-memory-bytes", strconv.Itoa(kib << 10)}
	if err := v.Restart(); err != nil {
		_ = v.Close()
		return nil, err
	}
	return v, nil
}

// highWater is how many batches an engine keeps for a slow reader.
const highWater = 16

// vllmBlock is the smallest block of vLLM on a CPU, in tokens.
const vllmBlock = 32

func (v *vllm) URL() string                { return "http://" + v.http }
func (v *vllm) KVEvents() (string, string) { return v.events, v.replay }
func (v *vllm) Kill()                      { _ = v.process.Kill() } // it may have ended
func (v *vllm) Close() error {
	if v.process != nil {
		v.process.Stop(10 * time.Second)
	}
	return nil
}

func (v *vllm) Restart() error {
	cmd := exec.Command("bash", v.args...) //nolint:gosec,noctx // stopped by Close, with its children
	cmd.Dir = repository()
	log := filepath.Join(v.dir, "vllm-"+strings.ReplaceAll(v.http, ":", "-")+".log")
	var err error
	if v.process, err = proc.Start(cmd, "vllm", log, (*exec.Cmd).Start); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	return v.process.Until(ctx, 50*time.Millisecond, func() bool { return healthy(ctx, v.URL()) })
}

func healthy(ctx context.Context, url string) bool {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/health", http.NoBody)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// repository is the root of the repository, in which the program has to be run.
func repository() string {
	dir, err := os.Getwd()
	for err == nil && dir != "/" {
		if _, missing := os.Stat(filepath.Join(dir, "go.work")); missing == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return "."
}

// startSimulated starts an engine of enginesim.
func startSimulated(steps int) (*enginesim.Engine, error) {
	return enginesim.Start(enginesim.Config{BlockSize: 16, Blocks: 256,
		KVEvents: &enginesim.KVEvents{Queue: highWater, BufferSteps: steps}})
}

// reset lets an engine forget all that it has cached.
func reset(ctx context.Context, url string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/reset_prefix_cache", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New("the engine does not reset its cache")
	}
	return nil
}
