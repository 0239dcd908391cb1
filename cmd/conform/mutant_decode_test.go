// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// transferTime is how long a decode engine may take to its first byte.
const transferTime = 6 * time.Second

// failure is an ending by which an engine gives a response up.
var failure = regexp.MustCompile(`"finish_reason":"(error|abort)"`)

// decodeLeg reports whether the client has its answer.
func (p *proxy) decodeLeg(w http.ResponseWriter, r *http.Request, m map[string]json.RawMessage,
	handoff json.RawMessage, pair []string, last bool) bool {
	leg := p.clone(m)
	if leg["kv_transfer_params"] = handoff; string(handoff) == "null" {
		delete(leg, "kv_transfer_params")
	}
	text, _ := json.Marshal(leg)
	ctx, hangs := context.WithCancel(r.Context())
	defer hangs()
	limit := transferTime
	if p.is("waits for transfers") {
		limit = time.Hour
	}
	timer := time.AfterFunc(limit, hangs)
	resp, err := p.send(r.WithContext(ctx), pair[1]+r.URL.Path, text)
	if err == nil {
		defer resp.Body.Close()
		body := bufio.NewReader(resp.Body)
		_, _ = body.Peek(1) // a stream's status may come before its first token
		resp.Body = io.NopCloser(body)
	}
	if !timer.Stop() {
		p.hung.Store(strings.Join(pair, " "), true)
		return p.lastly(w, last, errors.New("the transfer hangs"))
	}
	if err != nil {
		return p.lastly(w, last, err)
	}
	if (resp.StatusCode >= 500 || p.speaksForItself(resp)) && !last {
		return false
	}
	if resp.Header.Get("Content-Type") == "application/json" {
		text, err := io.ReadAll(resp.Body)
		if failure.Match(text) && !p.is("relays any ending") {
			return p.lastly(w, last, errors.New("the engine failed"))
		}
		text = p.withoutAddresses(resp.StatusCode, text)
		resp.ContentLength = max(resp.ContentLength, int64(len(text))) // of a response that was cut, the engine's
		if resp.StatusCode >= 400 {
			resp.ContentLength = int64(len(text))
		}
		resp.Body = io.NopCloser(io.MultiReader(bytes.NewReader(text), ends{err}))
	}
	p.copy(w, resp)
	return true
}

// copy sends D's response to the client.
func (p *proxy) copy(w http.ResponseWriter, resp *http.Response) {
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	if p.is("tells no type") {
		w.Header().Set("Content-Type", "text/plain")
	}
	status := resp.StatusCode
	if status == http.StatusBadRequest && p.is("answers decode's 400 with 200") {
		status = http.StatusOK
	}
	if n := resp.ContentLength; n >= 0 && !p.altersText() {
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	}
	w.WriteHeader(status)
	if p.is("copies without flushing") || p.is("discards cut streams") {
		all, err := io.ReadAll(resp.Body)
		if err != nil && p.is("discards cut streams") {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(all)
		p.end(w, err)
		return
	}
	buffer := make([]byte, 64<<10)
	for n := 0; ; n++ {
		k, err := resp.Body.Read(buffer)
		if failure.Match(buffer[:k]) && !p.is("relays any ending") {
			panic(http.ErrAbortHandler)
		}
		if err == nil || k > 0 {
			if _, bad := w.Write(p.text(buffer[:k])); bad != nil && p.is("copies without cancelling") {
				_, _ = io.Copy(io.Discard, resp.Body)
			}
			_ = http.NewResponseController(w).Flush()
		}
		if err != nil {
			p.end(w, err)
			return
		}
	}
}

func (p *proxy) altersText() bool {
	return slices.Contains([]string{"rewrites events", "swallows errors", "loses the usage", "answers half",
		"swaps answers"}, p.fault)
}

func (p *proxy) text(data []byte) []byte {
	switch p.fault {
	case "rewrites events":
		return bytes.ReplaceAll(data, []byte(`"model"`), []byte(`"the_model"`))
	case "swallows errors":
		if bytes.Contains(data, []byte(`"error"`)) {
			return []byte("data: [DONE]\n\n")
		}
	case "loses the usage":
		return bytes.ReplaceAll(data, []byte(`"usage"`), []byte(`"usages"`))
	case "swaps answers":
		return bytes.ReplaceAll(data, []byte(`"text":"`), []byte(`"text":"x`))
	}
	return data
}

// end ends a response that D has ended, or broken.
func (p *proxy) end(w http.ResponseWriter, err error) {
	if errors.Is(err, io.EOF) || err == nil {
		return
	}
	if p.is("makes cuts clean") {
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
		return
	}
	if p.is("answers half") {
		return
	}
	_ = http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}

// send sends a leg.
func (p *proxy) send(r *http.Request, url string, body []byte) (*http.Response, error) {
	ctx := r.Context()
	if p.is("copies without cancelling") {
		ctx = p.life
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if p.is("copies all headers") {
		maps.Copy(req.Header, r.Header)
	}
	for _, name := range []string{"Authorization", "X-Api-Key", "X-Request-Id", "Traceparent"} {
		if v := r.Header.Get(name); v != "" && !p.is("drops headers") && (name != "X-Api-Key" || !p.is("drops keys")) {
			req.Header.Set(name, v)
		}
	}
	req.Header.Set("Content-Type", "application/json")
	return p.engines.Do(req)
}
