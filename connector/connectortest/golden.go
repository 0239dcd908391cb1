// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// golden is one exchange as an engine's own version has it.
type golden struct {
	What   string `json:"what"`   // in one sentence
	Source string `json:"source"` // a recorded exchange, or the engine's file that says so

	Path            string            `json:"path"`   // of the client's request
	Config          json.RawMessage   `json:"config"` // of the connector
	Header          map[string]string `json:"header"` // the client's
	Request         json.RawMessage   `json:"request"`
	RequestID       string            `json:"requestId"`
	Random          string            `json:"random"` // the session's, 32 hexadecimal digits
	PrefillEndpoint goldenEndpoint    `json:"prefillEndpoint"`
	DecodeEndpoint  goldenEndpoint    `json:"decodeEndpoint"`

	Calls    map[string]goldenCall `json:"calls"`   // responses to side calls, by "METHOD URL"
	Encoded  []json.RawMessage     `json:"encoded"` // responses of encode engines, in the order of the items
	Response json.RawMessage       `json:"answer"`  // P's body
	Headers  map[string]string     `json:"headers"` // P's
	Event    json.RawMessage       `json:"event"`   // what an Expecter waited for; a string is the event's text

	Want struct {
		Unsupported string      `json:"unsupported"` // the member for which the request is not carried, instead of legs
		Encode      []goldenLeg `json:"encode"`
		First       *goldenLeg  `json:"first"` // decode's first try, where decode comes first
		Prefill     *goldenLeg  `json:"prefill"`
		Decode      *goldenLeg  `json:"decode"`
		Refused     string      `json:"refused"` // a part of the error's text, instead of decode
	} `json:"want"`
}

type goldenEndpoint struct {
	URL        string            `json:"url"`
	Attributes map[string]string `json:"attributes"`
}

type goldenCall struct {
	Status int             `json:"status"`
	Body   json.RawMessage `json:"body"`
}

type goldenLeg struct {
	Path   string            `json:"path"`   // only if it is not the client's
	Header map[string]string `json:"header"` // those that the connector sets
	Body   json.RawMessage   `json:"body"`
}

// Golden plays each file of dir/<engine>-<version>/*.json in a subtest. A file is one JSON object: what the client
// sends, what the engines answer, and what both legs must be then. Bodies are compared without white space; order of
// members and spelling of numbers and texts count.
//
//	{"what": "…", "source": "vLLM 0.32.0, recorded", "path": "/v1/completions", "config": {},
//	 "header": {}, "request": {…}, "requestId": "r-1", "random": "32 hexadecimal digits: the session's",
//	 "prefillEndpoint": {"url": "http://10.0.0.1:8100", "attributes": {}}, "decodeEndpoint": {…},
//	 "calls": {"GET http://10.0.0.1:8998/query": {"status": 200, "body": {…}}}, "answer": {…},
//	 "headers": {}, "event": {…},
//	 "want": {"prefill": {"path": "…", "header": {}, "body": {…}}, "decode": {…}}}
//
// want has "refused", a part of the error's text, in place of decode where the response is to be refused, and
// "unsupported", a member's name, alone where the request is not carried. "first" is decode's first try where decode
// comes first; "encode" lists the legs of an encode stage, whose responses are in "encoded". Nothing is started, and no
// event is waited for.
//
// Golden files are facts about engines, so nothing rewrites them.
func Golden(t *testing.T, factory func(config json.RawMessage) (connector.KVConnector, error), dir string) {
	t.Helper()
	var files []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(path) == ".json" {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files in %s: %v", dir, err)
	}
	for _, file := range files {
		name, err := filepath.Rel(dir, file)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(filepath.ToSlash(name), func(t *testing.T) {
			if err := checkGolden(t.Context(), factory, file); err != nil {
				t.Error(err)
			}
		})
	}
}

func checkGolden(ctx context.Context, factory func(json.RawMessage) (connector.KVConnector, error), file string) error {
	if engine, version, ok := strings.Cut(filepath.Base(filepath.Dir(file)), "-"); !ok || engine == "" ||
		version == "" {
		return errors.New("the file's folder is not named <engine>-<version>")
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var g golden
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&g); err != nil {
		return fmt.Errorf("not a golden file: %w", err)
	}
	if g.What == "" || g.Source == "" {
		return errors.New("what and source must say what the file shows and who says so")
	}
	if g.Want.Prefill == nil && g.Want.Decode == nil && g.Want.Refused == "" && g.Want.Unsupported == "" {
		return errors.New("want says nothing")
	}
	return g.check(ctx, factory)
}

func (g *golden) check(ctx context.Context, factory func(json.RawMessage) (connector.KVConnector, error)) error {
	c, err := factory(g.Config)
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	s, err := g.session()
	if err != nil {
		return err
	}
	t := &trial{ctx: ctx, c: c, traits: c.Traits()}
	t.order = t.traits.Order
	if s.Request, err = contract.Without(s.Request, t.traits.Members); err != nil { // as the flow does it
		return err
	}
	if reason := t.unsupported(s.Request); reason != g.Want.Unsupported {
		return fmt.Errorf("the request is unsupported for %q, want %q", reason, g.Want.Unsupported)
	} else if reason != "" {
		return nil
	}
	p, err := t.playWith(s, g.means())
	if p.prefill.body == nil && g.Want.Refused == "" {
		return err
	}
	if g.Want.Prefill != nil && p.prefill.body != nil {
		if err := g.Want.Prefill.check(p.prefill, s.API); err != nil {
			return fmt.Errorf("the prefill leg: %w", err)
		}
	}
	if g.Want.Refused != "" {
		if err == nil || panicked(err) || !strings.Contains(err.Error(), g.Want.Refused) {
			return fmt.Errorf("want an error with %q, got: %w", g.Want.Refused, err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if p.final {
		return errors.New("the prefill response is final, so there is no decode leg")
	}
	return g.checkLegs(p)
}

func (g *golden) checkLegs(p *played) error {
	if len(g.Want.Encode) != len(p.encode) {
		return fmt.Errorf("%d encode legs, want %d", len(p.encode), len(g.Want.Encode))
	}
	for i, want := range g.Want.Encode {
		if err := want.check(p.encode[i], p.s.API); err != nil {
			return fmt.Errorf("encode leg %d: %w", i, err)
		}
	}
	if g.Want.First != nil {
		if p.first == nil {
			return errors.New("decode does not come first")
		}
		if err := g.Want.First.check(*p.first, p.s.API); err != nil {
			return fmt.Errorf("decode's first try: %w", err)
		}
	}
	if g.Want.Decode == nil {
		return nil
	}
	if err := g.Want.Decode.check(p.decode, p.s.API); err != nil {
		return fmt.Errorf("the decode leg: %w", err)
	}
	return nil
}

func (g *golden) session() (*connector.Session, error) {
	api := connector.APIOf(g.Path)
	if api == connector.APIUnknown {
		return nil, fmt.Errorf("path: %q is no client API's", g.Path)
	}
	r, err := connector.ParseRequest(api, compact(g.Request))
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	var random [16]byte
	if n, err := hex.Decode(random[:], []byte(g.Random)); g.Random != "" && (err != nil || n != len(random)) {
		return nil, errors.New("random: want 32 hexadecimal digits")
	}
	p, err := g.PrefillEndpoint.endpoint("http://127.0.0.1:8100", discovery.RolePrefill)
	if err != nil {
		return nil, fmt.Errorf("prefillEndpoint: %w", err)
	}
	d, err := g.DecodeEndpoint.endpoint("http://127.0.0.1:8200", discovery.RoleDecode)
	if err != nil {
		return nil, fmt.Errorf("decodeEndpoint: %w", err)
	}
	s := contract.NewSessionWith(random, r, g.RequestID, p, d)
	s.CreatedAt, s.Header = began, http.Header{}
	for name, value := range g.Header {
		s.Header.Set(name, value)
	}
	return s, nil
}

func (e goldenEndpoint) endpoint(def string, role discovery.Role) (discovery.Endpoint, error) {
	if e.URL == "" {
		e.URL = def
	}
	made, err := discovery.New(e.URL, role)
	made.Attributes = e.Attributes
	return made, err
}

func (g *golden) means() means {
	items := 0
	return means{
		quiet: true,
		encoded: func(*connector.Session, connector.Item) json.RawMessage {
			if items++; items > len(g.Encoded) {
				return nil
			}
			return g.Encoded[items-1]
		},
		respond: func(s *connector.Session, _ []byte) Response { return g.response(s.API) },
		event: func(*connector.Session) connector.Event {
			body := []byte(g.Event)
			if text, err := jsonedit.Unquote(body); err == nil {
				body = []byte(text)
			}
			return connector.Event{Body: body, At: began}
		},
		call: func(r *http.Request) (*http.Response, error) {
			call, ok := g.Calls[r.Method+" "+r.URL.String()]
			if !ok {
				return nil, fmt.Errorf("connectortest: calls has no %s %s, only %v", r.Method, r.URL,
					slices.Sorted(maps.Keys(g.Calls)))
			}
			if call.Status == 0 {
				call.Status = http.StatusOK
			}
			return reply(call.Status, compact(call.Body)), nil
		},
	}
}

func (g *golden) response(api connector.API) Response {
	r := Response{Header: http.Header{}}
	for name, value := range g.Headers {
		r.Header.Set(name, value)
	}
	if g.Response != nil {
		r.Body = compact(g.Response)
	}
	return r.fill(connector.Handoff{}, api)
}

func (w *goldenLeg) check(got sent, api connector.API) error {
	path := w.Path
	if path == "" {
		path = api.Path()
	}
	if got.path != path {
		return fmt.Errorf("path %s, want %s", got.path, path)
	}
	header := map[string]string{}
	for _, h := range got.header {
		header[http.CanonicalHeaderKey(h.Name)] = h.Value
	}
	want := map[string]string{}
	for name, value := range w.Header {
		want[http.CanonicalHeaderKey(name)] = value
	}
	if !maps.Equal(header, want) {
		return fmt.Errorf("header %v, want %v", header, want)
	}
	if g, w := compact(got.body), compact(w.Body); !bytes.Equal(g, w) {
		return fmt.Errorf("body\n\t%s\nwant\n\t%s", g, w)
	}
	return nil
}

// compact removes white space between tokens, and nothing else.
func compact(raw []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return raw
	}
	return b.Bytes()
}
