// SPDX-License-Identifier: Apache-2.0

package reuse_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// without shows an engine's /metrics page less the metrics of these names.
func without(t *testing.T, e *enginesim.Engine, names ...string) string {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := http.NewRequestWithContext(r.Context(), r.Method, e.URL()+r.URL.Path, r.Body)
		if err != nil {
			return
		}
		resp, err := client.Do(req)
		if err != nil {
			return
		}
		defer resp.Body.Close()
		all, _ := io.ReadAll(resp.Body)
		for line := range strings.Lines(string(all)) {
			keep := true
			for _, name := range names {
				keep = keep && !strings.HasPrefix(line, name)
			}
			if keep {
				_, _ = io.WriteString(w, line)
			}
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// Decode engines of P2pNccl cannot compute a prompt themselves, but vLLM without a connector can, and answers as
// rightly. Releases before 0.16 tell only what a connector has promised; where even that is missing, nothing is proven.
func TestAnOldVLLMIsBelievedByWhatItWasPromised(t *testing.T) {
	c := conn(p2pnccl.New(nil))
	for rule, k := range map[string]struct {
		decode  string
		missing []string
		verdict reuse.Verdict
		err     string
	}{
		"promised":                 {"p2pnccl", []string{"vllm:prompt_tokens_by_source"}, reuse.Reused, ""},
		"a vLLM without connector": {"none", []string{"vllm:prompt_tokens_by_source"}, "", "nothing can be proven"},
		"older than both counters": {"p2pnccl",
			[]string{"vllm:prompt_tokens_by_source", "vllm:external_prefix_cache"}, "", "nothing can be proven"},
		"new, and without connector": {"none", nil, reuse.NotReused, ""},
	} {
		t.Run(rule, func(t *testing.T) {
			extra := map[string]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
			p, d, err := enginesim.Pair(enginesim.Config{Connector: "p2pnccl", Extra: extra},
				enginesim.Config{Connector: k.decode, Extra: extra})
			require.NoError(t, err)
			t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
			pe, err := discovery.New(p.URL(), discovery.RolePrefill)
			require.NoError(t, err)
			de, err := discovery.New(d.URL(), discovery.RoleDecode)
			require.NoError(t, err)
			pe.Attributes, de.Attributes = map[string]string{"zmqAddress": p.SideChannel()},
				map[string]string{"zmqAddress": "127.0.0.1:1"}
			if d.SideChannel() != "" {
				de.Attributes["zmqAddress"] = d.SideChannel()
			}
			x := pair{p, d, over(t, c, pe, de)}
			target := x.target(c)
			target.Decode = []string{without(t, d, k.missing...)}
			r, err := reuse.Verify(t.Context(), target,
				reuse.Options{Probes: 1, SkipText: true, Patience: 50 * time.Millisecond})
			if k.err != "" {
				require.ErrorContains(t, err, k.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, k.verdict, r.Verdict, "%s", r)
		})
	}
}
