// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// flips are what is done to the files of each prompt before D reads them.
var flips = []struct {
	what          string
	bytes, layers int // 0 layers: all
	found         bool
}{
	{what: "nothing"},
	{what: "one byte in one layer", bytes: 1, layers: 1},
	{what: "64 bytes in one layer", bytes: 64, layers: 1},
	{what: "a quarter of every layer", bytes: -4, found: true},
	{what: "nothing again"},
}

// attestProbes is how many synthetic probes each kind of flip gets.
const attestProbes = 20

// proveAttestation runs two vLLM engines with ExampleConnector, flips bytes in its files between the legs, and counts
// the synthetic probes that find it.
func proveAttestation(ctx context.Context, lab *lab) error {
	p, err := newPair(&verification{connector: "sharedstorage"}, lab)
	if err != nil {
		return err
	}
	defer p.stop()
	if err := p.run(ctx, stage{config: `{"sharedStoragePath":"$FOLDER"}`}); err != nil {
		return err
	}
	legs := transport.New(nil)
	defer func() { _ = legs.Close() }() // never fails
	f := &flipper{RoundTripper: legs, folder: p.values["FOLDER"], host: p.endpoints[1].URL.Host}
	prober, end, err := f.prober(ctx, p)
	if err != nil {
		return err
	}
	defer end()
	proven := true
	fmt.Printf("%-28s  %6s  %5s  %5s\n", "flipped before D reads", "probes", "right", "wrong")
	for _, kind := range flips {
		f.bytes, f.layers = kind.bytes, kind.layers
		right, wrong := 0, 0
		for range attestProbes {
			r, err := prober.Probe(ctx)
			if err = errors.Join(err, f.err); err != nil {
				return err
			}
			switch r.Verdict {
			case attest.Right:
				right++
			case attest.Wrong:
				wrong++
			}
		}
		fmt.Printf("%-28s  %6d  %5d  %5d\n", kind.what, attestProbes, right, wrong)
		proven = proven && (kind.bytes != 0 || right == attestProbes) && (!kind.found || wrong == attestProbes)
	}
	fmt.Printf("suspected, since one P and one D look alike: %v\n", prober.Suspects())
	if !proven {
		return errNotProven
	}
	return nil
}

// flipper flips bytes in the newest prompt's files before a leg is sent to D.
type flipper struct {
	http.RoundTripper
	folder, host  string
	bytes, layers int
	err           error
}

func (f *flipper) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host == f.host && f.bytes != 0 {
		f.err = errors.Join(f.err, f.flip())
	}
	return f.RoundTripper.RoundTrip(r)
}

func (f *flipper) flip() error {
	files, err := filepath.Glob(filepath.Join(newest(f.folder), "*.safetensors"))
	if err != nil || len(files) == 0 {
		return errors.Join(err, errors.New("the prompt has no files"))
	}
	if f.layers > 0 {
		files = files[:min(len(files), f.layers)]
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if len(data) < 8 || binary.LittleEndian.Uint64(data) > uint64(len(data)-8) {
			return errors.New("a file of the store is not in the format safetensors")
		}
		values := data[8+binary.LittleEndian.Uint64(data):]
		n := f.bytes
		if n < 0 {
			n = len(values) / -n
		}
		middle := values[len(values)/2:]
		for i := range min(n, len(middle)) {
			middle[i] ^= 0x55
		}
		if err := os.WriteFile(name, data, 0o600); err != nil { //nolint:gosec // of the proof's own folder
			return err
		}
	}
	return nil
}

// newest returns the folder that was made last.
func newest(parent string) (name string) {
	var at time.Time
	entries, _ := os.ReadDir(parent) // none: then there are no files, which flip reports
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.IsDir() && info.ModTime().After(at) {
			name, at = filepath.Join(parent, e.Name()), info.ModTime()
		}
	}
	return name
}

func (f *flipper) prober(ctx context.Context, p *pair) (*attest.Prober, func(), error) {
	set, err := static.NewSet(p.endpoints...)
	if err != nil {
		return nil, nil, err
	}
	flow, err := pdflow.New(p.conn, pick.New(set, pick.RoundRobin()), pdflow.WithTransport(f))
	if err != nil {
		return nil, nil, err
	}
	prober, err := attest.New(attest.Options{Flow: flow, Model: "tiny",
		Endpoints: func() []discovery.Endpoint { return p.endpoints }})
	return prober, func() { _ = flow.Shutdown(ctx) }, err // nothing is in flight
}
