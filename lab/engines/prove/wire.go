// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

// recordings is where the recorded exchanges are.
const recordings = "docs/protocols/recordings"

// recordedEngines are the connectors with recordings, and the --kv-transfer-config of the engines that were recorded.
// ROLE stands for the engine's kv_role, NAME for prefill or decode, FOLDER for a folder of both.
var recordedEngines = []struct{ connector, config string }{
	{"nixl", `{"kv_connector":"NixlConnector","kv_role":"ROLE","kv_buffer_device":"cpu"}`},
	{"nixl-push", `{"kv_connector":"NixlPushConnector","kv_role":"ROLE","kv_buffer_device":"cpu",` +
		`"engine_id":"pdkit-NAME"}`},
	{"sharedstorage", `{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
		`"kv_connector_extra_config":{"shared_storage_path":"FOLDER"}}`},
	{"multi", `{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[` +
		`{"kv_connector":"NixlConnector","kv_role":"ROLE","kv_buffer_device":"cpu"},` +
		`{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
		`"kv_connector_extra_config":{"shared_storage_path":"FOLDER"}}]}}`},
	{"mooncake", `{"kv_connector":"MooncakeConnector","kv_role":"ROLE","kv_connector_module_path":"mooncake_cpu",` +
		`"kv_connector_extra_config":{"mooncake_protocol":"tcp","num_workers":2}}`},
}

// wire is one comparison of the recordings with engines that run now.
type wire struct {
	lab     *lab
	all     bool      // also the recordings that need engines of their own
	names   []string  // connectors, or beginnings of recordings' names
	out     io.Writer // receives the report
	version string    // of the engines
	// counts for the last line of the report
	same, different, left int
}

// errDifferent says that the engines' responses have another shape than the recorded ones.
var errDifferent = errors.New("different")

func (w *wire) run(ctx context.Context) error {
	for _, engines := range recordedEngines {
		list, err := readRecordings(recordings, engines.connector)
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(r *recording) bool { return !w.wants(r) })
		if err := w.compareAll(ctx, engines.connector, engines.config, list); err != nil {
			return fmt.Errorf("%s: %w", engines.connector, err)
		}
	}
	if w.same+w.different == 0 {
		return errors.New("no recording was replayed")
	}
	fmt.Fprintf(w.out, "%d recordings: %d same, %d different, %d not replayed\n",
		w.same+w.different+w.left, w.same, w.different, w.left)
	if w.different > 0 {
		return errDifferent
	}
	return nil
}

func (w *wire) wants(r *recording) bool {
	return len(w.names) == 0 || slices.ContainsFunc(w.names, func(name string) bool {
		return strings.HasPrefix(r.name, name+"/") || strings.Contains(name, "/") && strings.HasPrefix(r.name, name)
	})
}

// compareAll replays one connector's recordings. It starts engines for the first, and anew where a recording needs its
// own or the last one has harmed them.
func (w *wire) compareAll(ctx context.Context, connector, config string, list []*recording) (err error) {
	var engines *wirePair
	defer func() { engines.stop() }()
	left := map[string][]string{} // reasons, and the names of what is not replayed
	for _, r := range list {
		reason := r.obstacle()
		if reason == "" && r.alone() && !w.all {
			reason = "it needs engines of its own (-all)"
		}
		if reason != "" {
			left[reason] = append(left[reason], r.name)
			continue
		}
		if r.alone() {
			engines.stop()
			engines = nil
		}
		if engines == nil {
			if engines, err = w.start(ctx, connector, config); err != nil {
				return err
			}
			w.head(ctx, list, engines)
		}
		responses := engines.replay(ctx, r)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.report(r, responses)
		if r.alone() || slices.Contains(responses, nil) || !engines.healthy(ctx) {
			engines.stop()
			engines = nil
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(left)) {
		w.left += len(left[reason])
		fmt.Fprintf(w.out, "not replayed, since %s: %s\n", reason, strings.Join(left[reason], ", "))
	}
	return nil
}

// head prints once which versions are compared.
func (w *wire) head(ctx context.Context, list []*recording, engines *wirePair) {
	if w.version != "" {
		return
	}
	var page struct{ Version string }
	if response := exchangeWith(ctx, engines.p+"/version", exchange{Seconds: 5}); response != nil {
		_ = json.Unmarshal(response.Body, &page)
	}
	w.version = cmp.Or(page.Version, "of unknown version")
	fmt.Fprintf(w.out, "vLLM %s against recordings of vLLM %s\n\n", w.version,
		cmp.Or(strings.Join(recordedVersions(list), " and "), "of unknown version"))
}

// report compares the responses with the recorded ones.
func (w *wire) report(r *recording, responses []*recordedResponse) {
	var lines []string
	for i, e := range r.Exchanges {
		found := changes(shapeOf(e.Response), shapeOf(responses[i]))
		if len(found) > 0 {
			lines = append(lines, fmt.Sprintf("%d. %s %s %s", i+1, e.Engine, e.Request.Method, e.Request.Path))
		}
		for _, line := range found {
			lines = append(lines, "   "+line)
		}
	}
	if len(lines) == 0 {
		w.same++
		fmt.Fprintf(w.out, "%s: same\n", r.name)
		return
	}
	w.different++
	fmt.Fprintf(w.out, "%s: different (%s)\n  %s\n", r.name, r.What, strings.Join(lines, "\n  "))
}

// wirePair are two engines to which recordings are replayed.
type wirePair struct {
	p, d      string // URLs
	where     where
	processes []*process
}

func (w *wire) start(ctx context.Context, connector, config string) (*wirePair, error) {
	folder, err := os.MkdirTemp(w.lab.dir, "store-")
	if err != nil {
		return nil, err
	}
	side, err := freeport.One()
	if err != nil {
		return nil, err
	}
	var wanted []engineOptions
	for _, o := range []engineOptions{{role: "prefill", side: side}, {role: "decode"}} {
		kvRole := map[string]string{"prefill": "kv_producer", "decode": "kv_consumer"}[o.role]
		text := strings.NewReplacer("ROLE", kvRole, "NAME", o.role, "FOLDER", folder).Replace(config)
		o.more = []string{"--kv-transfer-config", text}
		if o.side != "" {
			o.more = append(o.more, "VLLM_MOONCAKE_BOOTSTRAP_PORT="+o.side)
		}
		wanted = append(wanted, o)
	}
	processes, err := w.lab.startEngines(ctx, wanted...)
	if err != nil {
		return nil, err
	}
	pair := &wirePair{p: processes[0].url, d: processes[1].url, where: where{side: side}, processes: processes}
	if connector == "mooncake" {
		var ranks map[string]struct {
			EngineID string `json:"engine_id"`
		}
		if response := exchangeWith(ctx, pair.url("")+"/query", exchange{Seconds: 5}); response != nil {
			_ = json.Unmarshal(response.Body, &ranks)
		}
		if pair.where.engineID = ranks["0"].EngineID; pair.where.engineID == "" {
			pair.stop()
			return nil, errors.New("the bootstrap server does not tell the prefill engine's id")
		}
	}
	return pair, nil
}

func (p *wirePair) stop() {
	if p == nil {
		return
	}
	for _, process := range p.processes {
		process.stop()
	}
}

func (p *wirePair) url(engine string) string {
	switch engine {
	case "P":
		return p.p
	case "D":
		return p.d
	default:
		return "http://127.0.0.1:" + p.where.side
	}
}

func (p *wirePair) healthy(ctx context.Context) bool {
	return answersOK(ctx, p.p+"/health") && answersOK(ctx, p.d+"/health")
}

// replay sends the recorded requests in the recorded order, together where they were sent together, and returns the
// responses. One is nil where none came.
func (p *wirePair) replay(ctx context.Context, r *recording) []*recordedResponse {
	responses := make([]*recordedResponse, len(r.Exchanges))
	ended := make([]chan struct{}, len(r.Exchanges))
	for i := range ended {
		ended[i] = make(chan struct{})
	}
	var mu sync.Mutex
	var handoffs []handoff
	var all sync.WaitGroup
	for i, e := range r.Exchanges {
		all.Go(func() {
			defer close(ended[i])
			after, pause := r.start(i)
			for _, j := range after {
				<-ended[j]
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
			if told, ok := e.Request.Body[kvParams].(map[string]any); ok {
				e.Request.Body = maps.Clone(e.Request.Body)
				mu.Lock()
				e.Request.Body[kvParams] = splice(told, handoffs, p.where)
				mu.Unlock()
			}
			responses[i] = exchangeWith(ctx, p.url(e.Engine)+e.Request.Path, e)
			if h, found := handoffOf(e.Response, responses[i]); found {
				mu.Lock()
				handoffs = append(handoffs, h)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return responses
}

// exchangeWith sends a recorded request and returns the response as a recording holds it, or nil if none came. Where
// the recording's client gave up, it gives up after the same time; otherwise it waits a minute longer, since this
// machine may be slower.
func exchangeWith(ctx context.Context, url string, e exchange) *recordedResponse {
	patience := time.Duration(e.Seconds * float64(time.Second))
	if !strings.HasPrefix(e.ClientError, "TimeoutError") {
		patience += time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var content io.Reader
	if e.Request.Body != nil {
		raw, err := json.Marshal(e.Request.Body)
		if err != nil {
			return nil
		}
		content = bytes.NewReader(raw)
	}
	request, err := http.NewRequestWithContext(ctx, cmp.Or(e.Request.Method, http.MethodGet), url, content)
	if err != nil {
		return nil
	}
	if content != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	for name, value := range e.Request.Headers {
		request.Header.Set(name, value)
	}
	answered, err := plain.Do(request)
	if err != nil {
		return nil
	}
	defer answered.Body.Close()
	raw, err := io.ReadAll(answered.Body)
	if err != nil {
		return nil
	}
	response := &recordedResponse{Status: answered.StatusCode, Headers: map[string]string{}}
	for name, values := range answered.Header {
		response.Headers[strings.ToLower(name)] = strings.Join(values, ", ")
	}
	switch {
	case strings.HasPrefix(answered.Header.Get("Content-Type"), "text/event-stream"):
		response.SSELines = strings.Split(strings.TrimSpace(string(raw)), "\n")
	case json.Valid(raw):
		response.Body = raw
	}
	return response
}
