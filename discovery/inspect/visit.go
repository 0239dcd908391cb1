// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// The largest responses that are read, in bytes. vLLM 0.32.0 lists one model in 445; /metrics grows with models and
// ranks.
const (
	maxModels  = 1 << 20
	maxVersion = 4 << 10
	maxQuery   = 1 << 20
	maxInfo    = 2 << 20
	maxMetrics = 16 << 20
)

// Error is a question that failed, or whose response made no sense. Its text has no address.
type Error struct {
	Path   string // what was asked; "" if the client panicked
	Status int    // the response's status, if it was not 200
	Err    error  // nil for a status
}

// Error says which question failed, and how.
func (e *Error) Error() string {
	switch {
	case e.Path == "":
		return "inspect: the client panicked"
	case e.Err == nil:
		return fmt.Sprintf("inspect: GET %s: status %d", e.Path, e.Status)
	case errors.Is(e.Err, errSenseless), errors.Is(e.Err, errTooLarge):
		return "inspect: GET " + e.Path + ": " + e.Err.Error()
	case errors.Is(e.Err, context.DeadlineExceeded), errors.Is(e.Err, os.ErrDeadlineExceeded):
		return "inspect: GET " + e.Path + ": no whole response in time"
	}
	return "inspect: GET " + e.Path + ": the engine could not be reached, or broke off"
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

var errTooLarge = errors.New("the response is too large")

// visit asks one engine its questions.
type visit struct {
	s    *Source
	e    discovery.Endpoint
	old  Reading // the last reading
	full bool    // false: only /metrics is asked
	dead bool    // the engine could not be reached; ask nothing more
}

// outcome is what a visit found.
type outcome struct {
	reading   Reading
	failed    bool // nothing was learnt; the old facts stay
	restarted bool // a visit of /metrics alone found another process
}

// run asks one question after another. A panic of a foreign client is a failed visit.
func (v *visit) run(ctx context.Context) (a outcome) {
	defer func() {
		if p := recover(); p != nil {
			a = outcome{failed: true}
			v.observe("", fmt.Errorf("panic: %v", p))
		}
	}()
	if !v.full {
		m := v.metrics(ctx)
		v.models(ctx, &a.reading)
		if m == nil {
			a.failed = v.dead
			return a
		}
		// Compare with the engine's own last value, since the clocks of two machines differ.
		restarted := m.started != v.old.started && m.started > 0 && v.old.started > 0
		a.reading.Load, a.restarted = m.loadAt(time.Now()), restarted
		return a
	}
	r := &a.reading
	ask := v.s.o.Ask
	v.models(ctx, r)
	if ask&Version != 0 && v.e.Version == "" {
		v.get(ctx, "/version", maxVersion, func(b []byte) (err error) { r.Version, err = parseVersion(b); return err })
	}
	vllm := ask&Metrics == 0 && r.Version != "" // if /metrics is not asked, nobody else says whether it is vLLM
	if ask&Metrics != 0 {
		if m := v.metrics(ctx); m != nil {
			r.Load, r.started = m.loadAt(time.Now()), m.started
			r.DPStartRank, r.DPSize = ranksOf(m.engines)
			vllm = m.vllm
		}
	}
	if base := v.bootstrap(); base != nil && ask&MooncakeQuery != 0 && v.e.Role.Has(discovery.RolePrefill) {
		v.getURL(ctx, base, "/query", maxQuery, func(b []byte) (err error) {
			r.EngineIDs, err = parseQuery(b)
			return err
		})
		// The server of one pod counts the pod's ranks from 0, so another first rank makes no sense.
		if start, n := ranksOf(r.EngineIDs); start == 0 && r.DPSize == 0 && !vllm {
			r.DPSize = n
		}
	}
	if ask&SGLangInfo != 0 && !vllm && len(r.EngineIDs) == 0 {
		v.serverInfo(ctx, r)
	}
	if v.dead || ctx.Err() != nil {
		return outcome{failed: true}
	}
	r.At = time.Now()
	return a
}

// models asks for the model that the list does not know, and for adapters.
func (v *visit) models(ctx context.Context, r *Reading) {
	unknown := v.full && v.s.o.Ask&Models != 0 && v.e.Model == ""
	_, said := v.e.Attributes[attrAdapters]
	follow := v.s.o.Ask&Adapters != 0 && !said
	if !unknown && !follow {
		return
	}
	v.get(ctx, "/v1/models", maxModels, func(b []byte) error {
		m, err := parseModels(b, cmp.Or(v.s.o.Model, v.e.Model))
		if unknown {
			r.Model = m.name
		}
		if r.MaxModelLen = m.length; err == nil && follow {
			r.listed, r.Adapters = true, m.adapters
		}
		return err
	})
}

func (v *visit) serverInfo(ctx context.Context, r *Reading) {
	take := func(b []byte) error {
		info, err := parseServerInfo(b)
		if err == nil {
			r.DPSize, r.BootstrapPort = info.DPSize, info.BootstrapPort
			if v.e.Version == "" && r.Version == "" {
				r.Version = info.Version
			}
		}
		return err
	}
	if v.get(ctx, "/server_info", maxInfo, take) == http.StatusNotFound {
		v.get(ctx, "/get_server_info", maxInfo, take) // its older name
	}
}

// metrics reads the engine's /metrics. It returns nil if that failed.
func (v *visit) metrics(ctx context.Context) (m *metrics) {
	v.ask(ctx, v.e.URL, "/metrics", func(r io.Reader) (err error) {
		m, err = parseMetrics(&bounded{r: r, left: maxMetrics})
		return err
	})
	return m
}

func (m *metrics) loadAt(now time.Time) Load {
	if !m.load {
		return Load{}
	}
	return Load{At: now, KVUsage: m.usage, Running: int(m.running), Waiting: int(m.waiting), Fetching: int(m.fetches),
		KV: m.kv}
}

// bootstrap returns the address of P's Mooncake server, by the list's attributes; nil without one.
func (v *visit) bootstrap() *url.URL {
	if text := strings.TrimSpace(v.e.Attribute(attrBootstrapURL)); text != "" {
		u, err := discovery.ParseURL(text)
		if err != nil {
			return nil
		}
		return u
	}
	port, err := strconv.Atoi(strings.TrimSpace(v.e.Attribute(attrBootstrapPort)))
	if err != nil || port < 1 || port > 65535 {
		return nil
	}
	return &url.URL{Scheme: "http", Host: net.JoinHostPort(v.e.Host(), strconv.Itoa(port))}
}

func (v *visit) get(ctx context.Context, path string, limit int64, take func([]byte) error) (status int) {
	return v.getURL(ctx, v.e.URL, path, limit, take)
}

func (v *visit) getURL(ctx context.Context, base *url.URL, path string, limit int64,
	take func([]byte) error) (status int) {
	return v.ask(ctx, base, path, func(r io.Reader) error {
		body, err := io.ReadAll(&bounded{r: r, left: limit})
		if err != nil {
			return err
		}
		return take(body)
	})
}

// ask sends one question and gives the body of a response with status 200 to take. An engine that cannot be reached is
// dead for the rest of the visit. One that gives another status, or nonsense, is not.
func (v *visit) ask(ctx context.Context, base *url.URL, path string, take func(io.Reader) error) (status int) {
	if v.dead {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, v.s.o.Timeout)
	defer cancel()
	resp, err := v.s.o.Client.RoundTrip(v.request(ctx, base, path))
	if err != nil {
		v.dead = sameURL(base, v.e.URL) // a Mooncake server that is not there yet says nothing about the engine
		v.observe(path, err)
		return 0
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		// the engine is starting or ending: ask it again soon
		v.dead = v.dead || resp.StatusCode == http.StatusServiceUnavailable
		if resp.StatusCode != http.StatusNotFound { // many engines lack some of the paths
			v.tell(&Error{Path: path, Status: resp.StatusCode})
		}
		return resp.StatusCode
	}
	if err := take(resp.Body); err != nil {
		v.dead = v.dead || sameURL(base, v.e.URL) && !errors.Is(err, errSenseless) && !errors.Is(err, errTooLarge)
		v.observe(path, err)
	}
	return resp.StatusCode
}

func sameURL(a, b *url.URL) bool { return a == b || *a == *b }

func (v *visit) request(ctx context.Context, base *url.URL, path string) *http.Request {
	u := *base
	u.Path, u.RawPath = u.Path+path, ""
	header := http.Header{"User-Agent": {"pdkit-inspect"}}
	if base != v.e.URL {
		header["Authorization"] = nil // a key for engines, which a client may add, is not for their Mooncake server
	}
	r := &http.Request{Method: http.MethodGet, URL: &u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header}
	return r.WithContext(ctx)
}

func (v *visit) observe(path string, err error) { v.tell(&Error{Path: path, Err: err}) }

func (v *visit) tell(e *Error) {
	if v.s.o.Observe != nil {
		v.s.o.Observe(v.e.ID, e)
	}
}

// bounded is a reader that fails at its limit. io.LimitReader would end there, as if the response had ended.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLarge
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	return n, err
}
