// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"
)

// recording is a file of docs/protocols/recordings: what a client and two engines said.
type recording struct {
	name      string // like nixl/01-completions
	What      string
	Exchanges []exchange
}

type exchange struct {
	Engine  string  // P, D, or "" for P's bootstrap server
	At      float64 // seconds since the recording began
	Seconds float64
	Request struct {
		Method, Path string
		Headers      map[string]string
		Body         map[string]any
	}
	Response    *recordedResponse
	ClientError string `json:"client_error"` // why there is no response
}

type recordedResponse struct {
	Status   int
	Headers  map[string]string
	Body     json.RawMessage
	SSELines []string `json:"sse_lines"`
}

// cannotReplay are recordings for which requests to two engines are not enough, by the beginning of their names.
var cannotReplay = map[string]string{
	"mooncake/16-":  "P is killed",
	"mooncake/17-":  "it needs a P with orphans from before",
	"mooncake/18-":  "it needs another abort time-out",
	"mooncake/19-":  "it needs another abort time-out",
	"nixl-push/09-": "P is killed",
	"nixl/43-":      "it needs a port that never answers",
	"nixl/44-":      "it needs a port that never answers",
	"nixl/45c-":     "its client leaves after 10 ms, before or after P has responded",
	"nixl/52-":      "P is killed",
	"nixl/53-":      "P is killed",
	"nixl/54-":      "P is stopped",
	"nixl/55-":      "D is killed",
	"nixl/55b-":     "D is killed",
	"nixl/58-":      "it needs kv_load_failure_policy recompute",
	"nixl/58b-":     "it needs kv_load_failure_policy recompute",
	"nixl/59-":      "P is killed",
	"nixl/60-":      "it needs a small cache and a short lease",
	"nixl/61-":      "it needs a small cache and a short lease",
	// P ends, too, only if the folder holds a prompt of at most one block (docs/protocols/sharedstorage.md).
	"sharedstorage/11-": "it needs a folder with another short prompt",
}

func (r *recording) obstacle() string {
	for prefix, reason := range cannotReplay {
		if strings.HasPrefix(r.name, prefix) {
			return reason
		}
	}
	return ""
}

// alone is true if the recording needs engines of its own. It leaves one dead or a request behind, or it is 51e: its
// handoff lacks what D needs only for its first handshake with P, and after it a good handoff of P may fail for 5 s.
func (r *recording) alone() bool {
	return strings.HasPrefix(r.name, "nixl/51e-") || slices.ContainsFunc(r.Exchanges, func(e exchange) bool {
		return e.ClientError != "" || e.Response == nil ||
			e.Request.Path == "/health" && e.Response.Status != http.StatusOK
	})
}

// readRecordings reads a connector's recordings, ordered by name.
func readRecordings(root, connector string) (list []*recording, err error) {
	files, err := filepath.Glob(filepath.Join(root, connector, "*.json"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no recordings in %s", filepath.Join(root, connector))
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		r := &recording{name: connector + "/" + strings.TrimSuffix(filepath.Base(file), ".json")}
		var one exchange // of a file that holds nothing else
		if err := json.Unmarshal(raw, r); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if err := json.Unmarshal(raw, &one); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if one.Request.Path != "" {
			r.Exchanges = []exchange{one}
		}
		list = append(list, r)
	}
	return list, nil
}

// fingerprint holds the version of the engine that responded.
var fingerprint = regexp.MustCompile(`"system_fingerprint":\s*"vllm-([^"]+)-[0-9a-f]+"`)

// recordedVersions lists the versions of the engines that were recorded.
func recordedVersions(list []*recording) (versions []string) {
	for _, r := range list {
		for _, e := range r.Exchanges {
			if e.Response == nil {
				continue
			}
			for _, m := range fingerprint.FindAllSubmatch(e.Response.Body, -1) {
				versions = append(versions, string(m[1]))
			}
		}
	}
	slices.Sort(versions)
	return slices.Compact(versions)
}

// start says when an exchange begins: after the exchanges that ended before it in the recording, and as much later as
// it was then. A hundredth of a second is what the recordings' times are rounded to.
func (r *recording) start(i int) (after []int, pause time.Duration) {
	e := r.Exchanges[i]
	last := slices.MinFunc(r.Exchanges, func(a, b exchange) int { return int(1000 * (a.At - b.At)) }).At
	for j, other := range r.Exchanges[:i] {
		if end := other.At + other.Seconds; end <= e.At+0.01 {
			after, last = append(after, j), max(last, end)
		}
	}
	return after, time.Duration(max(0, e.At-last) * float64(time.Second))
}

const kvParams = "kv_transfer_params"

// handoff is what P put into its response, in the recording and now.
type handoff struct{ recorded, now map[string]any }

func handoffOf(recorded, now *recordedResponse) (h handoff, found bool) {
	read := func(r *recordedResponse) map[string]any {
		var body struct {
			Params map[string]any `json:"kv_transfer_params"`
		}
		if r == nil || json.Unmarshal(r.Body, &body) != nil {
			return nil
		}
		return body.Params
	}
	h = handoff{read(recorded), read(now)}
	return h, h.recorded != nil && h.now != nil
}

// where is P of the engines that run now.
type where struct{ side, engineID string }

// drawn is an engine id that an engine made itself.
var drawn = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// splice returns a recorded request's parameters for the engines that run now. Each value that the recording's client
// took from P's handoff is taken from P's handoff of now; what it had planted itself, like the id of no engine, stays.
// Without a handoff, the parameters name P by its address, and by an id that P has made.
func splice(recorded map[string]any, handoffs []handoff, p where) map[string]any {
	result := maps.Clone(recorded)
	if len(handoffs) == 0 {
		if _, found := recorded["remote_port"].(float64); found {
			result["remote_port"] = json.Number(p.side)
		}
		address, _ := recorded["remote_bootstrap_addr"].(string)
		if address != "" && !strings.HasSuffix(address, ":1") {
			result["remote_bootstrap_addr"] = "http://127.0.0.1:" + p.side
		}
		if id, _ := recorded["remote_engine_id"].(string); drawn.MatchString(id) {
			result["remote_engine_id"] = p.engineID
		}
		return result
	}
	taken := func(h handoff) (keys []string) {
		for key, value := range h.recorded {
			if told, found := recorded[key]; found && reflect.DeepEqual(told, value) {
				keys = append(keys, key)
			}
		}
		return keys
	}
	from := slices.MaxFunc(handoffs, func(a, b handoff) int { return len(taken(a)) - len(taken(b)) })
	keys := taken(from)
	for _, key := range keys {
		delete(result, key)
		if value, found := from.now[key]; found {
			result[key] = value
		}
	}
	if len(keys) == len(from.recorded) { // the whole handoff was relayed: relay also what is new in it
		for key, value := range from.now {
			if _, found := from.recorded[key]; !found {
				result[key] = value
			}
		}
	}
	return result
}
