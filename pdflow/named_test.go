// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A request that names one engine of its pair keeps that one over all its attempts, while the other engine differs.
func TestANamedEngineIsKeptOverAllAttempts(t *testing.T) {
	bad := replies(500)
	lost := streaming(0, io.ErrUnexpectedEOF, token(10, "null", "[1,2,3]"), token(11, "null", "null"))
	rest := streaming(0, nil, token(12, `"length"`, "[1,2,3,10,11]"), theEnd)
	slow := after(5*time.Second, replies(200))
	type engines = map[string]response
	noD := engines{"d1": bad}
	p0, p1, d1 := pdflow.Request{Prefill: "p0"}, pdflow.Request{Prefill: "p1"}, pdflow.Request{Decode: "d1"}
	for name, c := range map[string]struct {
		in      pdflow.Request
		answers engines
		want    string // legs, then the code
		how     string // hedge, fallback or stream
	}{
		"its D":                {in: d1, want: "p0 d1"},
		"its P":                {in: p1, want: "p1 d0"},
		"both":                 {in: pdflow.Request{Prefill: "p1", Decode: "d1"}, want: "p1 d1"},
		"its D, and a P fails": {in: d1, answers: engines{"p0": bad}, want: "p0 p1 d1"},
		"its P, and a D fails": {in: p1, answers: engines{"d0": bad}, want: "p1 d0 p1 d1"},
		"its D fails":          {in: d1, answers: noD, want: "p0 d1 p1 d1 decode_failed"},
		"its P fails": {in: p1, answers: engines{"p1": bad},
			want: "p1 p1 prefill_failed"}, //nolint:dupword // legs
		"its P runs out of time": {in: p1, answers: engines{"p1": hangs}, want: "p1 timeout"},
		"its D, and no P serves": {in: d1, answers: engines{"p0": bad, "p1": bad}, how: "fallback", want: "p0 p1 d1"},
		"its D fails, and alone, too": {in: d1, answers: noD, how: "fallback",
			want: "p0 d1 p1 d1 d1 decode_failed"}, //nolint:dupword // legs
		"its P fails, and any D may": {in: p1, answers: engines{"p1": bad}, how: "fallback",
			want: "p1 p1 d0"}, //nolint:dupword // legs
		"its D is not listed":    {in: pdflow.Request{Decode: "gone"}, how: "fallback", want: "not_found"},
		"its P is not listed":    {in: pdflow.Request{Prefill: "gone"}, how: "fallback", want: "not_found"},
		"its D, and a P is slow": {in: d1, answers: engines{"p0": slow}, how: "hedge", want: "p0 p1 d1"},
		"its P is slow":          {in: p0, answers: engines{"p0": slow}, how: "hedge", want: "p0 d0"},
		"its P, and a D breaks its stream": {in: p1, answers: engines{"d0": lost, "d1": rest}, how: "stream",
			want: "p1 d0 p1 d1"},
		"its D breaks its stream, and lives": {in: d1, answers: engines{"d1": oneAfterTheOther(lost, rest)},
			how: "stream", want: "p0 d1 p1 d1"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var conn connector.KVConnector = &fake{}
				retry, body := config.Retry{MaxAttempts: 2, BackoffBase: config.None}, `{"prompt":"hi"}`
				opts := []pdflow.Option{pdflow.WithRescue(1)}
				switch c.how {
				case "hedge":
					conn, retry.Hedge = &storing{}, 2*time.Second
				case "fallback":
					opts = append(opts, pdflow.WithFallback(config.FallbackDecode))
				case "stream":
					body = completion("a", `"stream":true`)
				}
				f := newFakeFleet(t, conn, "p0 p1 d0 d1", retry, func(host string, _ int) response {
					if answer := c.answers[host]; answer != nil {
						return answer
					}
					return replies(200)
				}, opts...)
				c.in.API, c.in.Body = connector.APICompletions, []byte(body)
				got := f.doAs(&c.in)
				require.Equal(t, c.want, strings.TrimSpace(f.hosts()+" "+got))
				synctest.Wait()
			})
		})
	}
}

// doAs runs a request to its end and returns the code of its error.
func (f *fakeFleet) doAs(in *pdflow.Request) string {
	resp, err := f.flow.Do(context.Background(), in)
	if err != nil {
		return string(codeOf(err))
	}
	defer resp.Body.Close()
	if _, err = io.Copy(io.Discard, resp.Body); err != nil {
		return err.Error()
	}
	return ""
}

func oneAfterTheOther(answers ...response) response {
	n := -1
	return func(r *http.Request) (*http.Response, error) {
		n = min(n+1, len(answers)-1)
		return answers[n](r)
	}
}

func TestANamedEngineAndAGivenPairContradict(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok))
	_, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`),
		Pick: &x.pair, Decode: x.pair.Decode.ID})
	require.ErrorIs(t, err, pdflow.CodeInvalid)
	assert.Empty(t, x.seen.list())
}

// A picker that does not know of named engines must not have its way.
func TestAnotherEngineThanTheNamedOneGetsNothing(t *testing.T) {
	p, d := endpoint(t, "http://p", discovery.RolePrefill), endpoint(t, "http://d", discovery.RoleDecode)
	given := 0
	picker := pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
		return pdflow.Pick{Prefill: p, Decode: d, Done: func(*pdflow.Outcome) { given++ }}, nil
	})
	flow, err := pdflow.New(&fake{}, picker)
	require.NoError(t, err)
	for i, in := range []pdflow.Request{{Decode: "other"}, {Prefill: "other"}, {Decode: p.ID}} {
		in.API, in.Body = connector.APICompletions, []byte(`{"prompt":"hi"}`)
		_, err = flow.Do(t.Context(), &in)
		require.ErrorIs(t, err, pdflow.CodeInternal)
		require.Equal(t, i+1, given, "the pick is given back")
	}
	require.NoError(t, flow.Shutdown(t.Context()))
}
