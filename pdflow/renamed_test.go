// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
)

// A host that relays a response gives its pieces to Rename, and the client reads its own name for the model, however
// the pieces are cut.
func TestARelayedResponseHasTheClientsName(t *testing.T) {
	const (
		chunk = `data: {"model":"big","choices":[]}` + "\n\n"
		mine  = `data: {"model":"gpt-4o","choices":[]}` + "\n\n"
	)
	for name, c := range map[string]struct {
		status         int
		stream         string
		response, want string
		holds          string // in place of want
	}{
		"events": {200, "true", ": hi\n\n" + chunk + chunk + "data: [DONE]\n\n",
			": hi\n\n" + mine + mine + "data: [DONE]\n\n", ""},
		"an event of many lines": {200, "true", "event: x\ndata: {\ndata: \"model\":\"big\"}\n\n",
			"event: x\ndata: {\ndata: \"model\":\"gpt-4o\"}\n\n", ""},
		"a last one without an end":   {200, "true", chunk + chunk[:len(chunk)-2], mine + mine, ""},
		"no stream, though asked for": {200, "true", `{"model":"big"}`, `{"model":"gpt-4o"}`, ""},
		"whole": {200, "false", "{\"a\":1,\n\n\"model\":\"big\"}",
			"{\"a\":1,\n\n\"model\":\"gpt-4o\"}", ""},
		"nothing": {200, "true", "", "", ""},
		"an error event": {200, "true", `data: {"error":{"message":"big failed at 10.0.0.7","code":500}}` + "\n\n",
			"", `gpt-4o failed at`},
		"a refusal": {400, "true", `{"error":{"message":"big cannot do it at 10.0.0.7"}}`, "",
			`"gpt-4o cannot`},
		"no JSON":              {500, "true", "big fell over", "", "the decode engine answered with an error"},
		"a refusal, no stream": {404, "false", `{"error":{"message":"no big"}}`, "", `"no gpt-4o"`},
	} {
		t.Run(name, func(t *testing.T) {
			for _, size := range []int{1, 3, 1 << 20} {
				x := script(t, &fake{}, answer(ok), answer(fromD), pdflow.WithModel("big", "gpt-4o"))
				s, resp := relayed(t, x, c.stream, c.status, true)
				require.NotNil(t, resp.Rename)
				got := ""
				for rest, last := c.response, false; !last; {
					n := min(size, len(rest))
					last = n == len(rest)
					out, err := resp.Rename([]byte(rest[:n]), last)
					require.NoError(t, err)
					got, rest = got+string(out), rest[n:]
				}
				if c.holds == "" {
					assert.Equal(t, c.want, got, size)
				}
				assert.Contains(t, got, c.holds)
				assert.NotContains(t, got, "10.0.0.7")
				s.End(nil)
			}
		})
	}
}

// Who does not say that it renames may not relay, and who has the engines' name has nothing to rename. An event without
// an end is not held for ever.
func TestWhatIsNotRenamed(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD), pdflow.WithModel("big", "gpt-4o"))
	s, resp := relayed(t, x, "true", 200, false)
	assert.Nil(t, resp)
	s.End(nil)

	x = script(t, &fake{}, answer(ok), answer(fromD), pdflow.WithModel("big", "gpt-4o"))
	s, resp = relayed(t, x, "true", 400, true)
	_, err := resp.Rename([]byte(strings.Repeat("x", 1<<20+1)), false)
	require.ErrorIs(t, err, pdflow.CodeStreamBroken)
	s.End(err)

	x = script(t, &fake{}, answer(ok), answer(fromD))
	s, resp = relayed(t, x, "true", 200, true)
	assert.Nil(t, resp.Rename)
	s.End(nil)
}

// relayed is a request for gpt-4o whose response the host relays; nil if it may not.
func relayed(t *testing.T, x *scripted, stream string, status int, renames bool) (*pdflow.Steps, *pdflow.Response) {
	t.Helper()
	s := begin(t, x.flow, `{"model":"gpt-4o","prompt":"hi","stream":`+stream+`}`, nil)
	if renames {
		s.Renames()
	}
	step, _, err := s.Next(context.Background())
	require.NoError(t, err)
	req, err := step.Take()
	require.NoError(t, err)
	step.Done(client.Transport.RoundTrip(req))
	step, _, err = s.Next(context.Background())
	require.NoError(t, err)
	require.Equal(t, renames, step.Relayable())
	if !renames {
		require.ErrorIs(t, step.Relay(http.StatusOK), pdflow.CodeUnsupported)
		return s, nil
	}
	_, err = step.Take()
	require.NoError(t, err)
	require.NoError(t, step.Relay(status))
	_, resp, err := s.Next(context.Background())
	require.NoError(t, err)
	return s, resp
}
