// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// roleFile is a gateway whose engines stand in a file, with the roles that the test gives them.
type roleFile struct {
	*program
	path string
}

// startRoles starts one over a list, with a connector.
func startRoles(t *testing.T, connector string, engines ...string) *roleFile {
	t.Helper()
	f := &roleFile{path: filepath.Join(t.TempDir(), "engines.yaml")}
	lists(t, f.path, listYAML(engines...))
	f.program = start(t, gatewayYAML("")+serverYAML("tiny",
		fmt.Sprintf("  kvConnector: {type: %s}\n  discovery: {file: {path: %q}}\n", connector, f.path)))
	f.knows(len(engines))
	return f
}

// as is an engine's entry of the list.
func as(role string, e *enginesim.Engine) string { return entry(e.URL(), role, nil) }

func newSim(t *testing.T, c enginesim.Config) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(c)
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return e
}

var anyRole = enginesim.Config{Connector: "nixl", KVRole: enginesim.RoleBoth}

// post sends a completion with further members, and returns how it was served.
func (f *roleFile) post(t *testing.T, n int, members string) (status int, mode, response string) {
	t.Helper()
	status, h, response := f.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4,`+
		`"temperature":0%s}`, strings.Repeat(fmt.Sprintf("roles %d ", n), 40), members))
	return status, h.Get("X-PD-Mode"), response
}

// legs counts the requests that an engine got to prefill alone, to decode what another one has prefilled, and to serve
// whole.
func legs(e *enginesim.Engine) (prefill, decode, whole int) {
	for _, r := range e.Requests() {
		switch body := string(r.Body); {
		case r.Method != http.MethodPost:
		case strings.Contains(body, `"do_remote_decode":true`), strings.Contains(body, `"do_remote_decode": true`):
			prefill++
		case strings.Contains(body, `"do_remote_prefill"`):
			decode++
		default:
			whole++
		}
	}
	return prefill, decode, whole
}

func TestAnEngineOfRoleBothServesAlone(t *testing.T) {
	e := newSim(t, anyRole)
	f := startRoles(t, "nixl", as("both", e))
	for n := range 5 {
		status, mode, response := f.post(t, n, "")
		require.Equal(t, http.StatusOK, status, response)
		assert.Equal(t, "aggregated", mode)
	}
	status, response := f.ready()
	assert.Equal(t, http.StatusOK, status, response)
	p, d, whole := legs(e)
	assert.Equal(t, [3]int{0, 0, 5}, [3]int{p, d, whole}, "no transfer member reaches it")
}

// Engines of role both are pairs among themselves, and with those of one role.
func TestEnginesOfRoleBothTakePartInPairs(t *testing.T) {
	a, b, p, d := newSim(t, anyRole), newSim(t, anyRole), newSim(t, anyRole), newSim(t, anyRole)
	for name, c := range map[string]struct {
		list     []string
		prefills []*enginesim.Engine
		decodes  []*enginesim.Engine
	}{
		"two of both": {[]string{as("both", a), as("both", b)}, []*enginesim.Engine{a, b},
			[]*enginesim.Engine{a, b}},
		"both and prefill": {[]string{as("both", a), as("prefill", p)}, []*enginesim.Engine{p},
			[]*enginesim.Engine{a}},
		"both and decode": {[]string{as("both", a), as("decode", d)}, []*enginesim.Engine{a},
			[]*enginesim.Engine{d}},
		"one of each, and it": {[]string{as("prefill", p), as("decode", d), as("both", b)}, []*enginesim.Engine{p},
			[]*enginesim.Engine{d, b}},
	} {
		t.Run(name, func(t *testing.T) {
			f := startRoles(t, "nixl", c.list...)
			type count struct{ prefill, decode int }
			before := map[*enginesim.Engine]count{}
			for _, e := range []*enginesim.Engine{a, b, p, d} {
				pn, dn, _ := legs(e)
				before[e] = count{pn, dn}
			}
			modes := map[string]int{}
			for n := range 24 {
				status, mode, response := f.post(t, n, "")
				require.Equal(t, http.StatusOK, status, response)
				modes[mode]++
			}
			assert.Equal(t, map[string]int{"disaggregated": 24}, modes)
			for _, e := range c.prefills {
				pn, _, _ := legs(e)
				assert.Greater(t, pn, before[e].prefill)
			}
			for _, e := range c.decodes {
				_, dn, _ := legs(e)
				assert.Greater(t, dn, before[e].decode)
			}
		})
	}
}

// What SGLang's pairs cannot carry goes to an engine of role both, which takes no part in pairs; without one it is
// refused.
func TestWhatSGLangsPairsCannotCarryGoesToAnEngineOfRoleBoth(t *testing.T) {
	p, d := simPair(t, enginesim.Config{Connector: "sglang"}, enginesim.Config{Connector: "sglang"})
	both := newSim(t, enginesim.Config{Connector: "sglang", KVRole: enginesim.RoleBoth})
	boot, _ := bootstrapPort(p, d)
	pair := []string{entry(p.URL(), "prefill", boot), as("decode", d)}
	const unsupported = `,"echo":true,"logprobs":1`

	f := startRoles(t, "sglang", pair...)
	status, _, response := f.post(t, 1, unsupported)
	assert.Equal(t, http.StatusBadRequest, status, response)
	status, mode, response := f.post(t, 2, "")
	require.Equal(t, http.StatusOK, status, response)
	assert.Equal(t, "disaggregated", mode)

	lists(t, f.path, listYAML(append(pair, as("both", both))...))
	eventually(t, func() bool {
		response := f.page("/debug/pd")
		return strings.Contains(response, both.URL())
	})
	for n := range 6 {
		status, mode, response = f.post(t, 10+n, unsupported)
		require.Equal(t, http.StatusOK, status, response)
		assert.Equal(t, "aggregated", mode)
	}
	assert.Len(t, both.Requests(), 6)
	for n := range 12 {
		status, mode, response = f.post(t, 20+n, "")
		require.Equal(t, http.StatusOK, status, response)
		assert.Equal(t, "disaggregated", mode, "a pair that is there is not passed over")
	}
	assert.Len(t, both.Requests(), 6, "it takes no part in pairs")

	// Alone, it serves everything.
	lists(t, f.path, listYAML(as("both", both)))
	eventually(t, func() bool {
		status, mode, _ = f.post(t, 40, "")
		return status == http.StatusOK && mode == "aggregated"
	})
	status, response = f.ready()
	assert.Equal(t, http.StatusOK, status, "who serves is ready: %s", response)
}

// Prefill engines become decode engines and back, by the file, while requests run: none fails, and each engine serves
// what it is for.
func TestRolesChangeByTheFileWhileRequestsRun(t *testing.T) {
	t.Parallel()
	var engines []*enginesim.Engine
	for range 4 {
		engines = append(engines, newSim(t, anyRole))
	}
	list := func(turn int) (entries []string) {
		for i, e := range engines {
			entries = append(entries, as(map[bool]string{true: "prefill", false: "decode"}[(i+turn)%4 < 2], e))
		}
		return entries
	}
	f := startRoles(t, "nixl", list(0)...)
	reaches := func(turn int) { // until each engine has got what it is for now
		t.Helper()
		type count struct{ prefill, decode int }
		before := make([]count, 4)
		for i, e := range engines {
			before[i].prefill, before[i].decode, _ = legs(e)
		}
		eventually(t, func() bool {
			for i, e := range engines {
				p, d, _ := legs(e)
				if (i+turn)%4 < 2 && p == before[i].prefill || (i+turn)%4 >= 2 && d == before[i].decode {
					return false
				}
			}
			return true
		}, "turn %d", turn)
	}

	tr := send(t, f.client+"/v1/completions", func(n int64) string {
		return fmt.Sprintf(`{"model":"tiny","prompt":"roles change, request %d","max_tokens":4}`, n)
	}, 200)
	reaches(0)
	for turn := 1; turn <= 12; turn++ {
		lists(t, f.path, listYAML(list(turn)...))
		reaches(turn)
	}
	assert.Empty(t, tr.end(), "of %d", tr.sent.Load())
	for _, e := range engines {
		require.NoError(t, e.WaitIdle(t.Context()))
		assert.NoError(t, e.CheckKV())
	}
}
