// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/lab/bench/internal/load"
)

// fakePeer is set where the test program runs as a peer. Its value says what the peer does wrong.
const fakePeer = "PDKIT_FAKE_PEER"

func TestMain(m *testing.M) {
	if wrong := os.Getenv(fakePeer); wrong != "" {
		fmt.Fprintln(os.Stderr, runFakePeer(wrong, os.Args[1:]))
		os.Exit(3)
	}
	os.Exit(m.Run())
}

// runFakePeer is a gateway that decodes requests and writes them anew.
func runFakePeer(wrong string, args []string) error {
	flags := flag.NewFlagSet("peer", flag.ContinueOnError)
	prefill, decode := flags.String("prefill", "", ""), flags.String("decode", "", "")
	host, port := flags.String("host", "", ""), flags.String("port", "", "")
	flags.String("prometheus-host", "", "")
	flags.String("prometheus-port", "", "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var served atomic.Int64
	serve := func(w http.ResponseWriter, r *http.Request) {
		n := served.Add(1)
		if wrong == "ends" && n > 5 {
			os.Exit(4)
		}
		var body map[string]any
		d := json.NewDecoder(r.Body)
		d.UseNumber()
		_ = d.Decode(&body) // the engines answer 400 to nonsense
		limit := body["max_tokens"]
		body["max_tokens"], body["kv_transfer_params"] = 1, map[string]any{"do_remote_decode": true}
		var prefilled map[string]any
		d = json.NewDecoder(bytes.NewReader(leg(*prefill, body)))
		d.UseNumber()
		_ = d.Decode(&prefilled)
		body["max_tokens"], body["kv_transfer_params"] = limit, prefilled["kv_transfer_params"]
		text := leg(*decode, body)
		if wrong == "lies" && n%10 == 0 {
			text = bytes.Replace(text, []byte(`"assistant"`), []byte(`"user"`), 1)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text) // a client that went away is the benchmark's to see
	}
	server := &http.Server{Addr: *host + ":" + *port, Handler: http.HandlerFunc(serve), ReadHeaderTimeout: time.Minute}
	return server.ListenAndServe()
}

func leg(engine string, body map[string]any) []byte {
	text, err := json.Marshal(body)
	if err != nil {
		return nil
	}
	url := engine + "/v1/chat/completions"
	res, err := http.Post(url, "application/json", bytes.NewReader(text))
	if err != nil {
		return nil
	}
	defer res.Body.Close()
	text, _ = io.ReadAll(res.Body) // the client sees that it is cut
	return text
}

// testLab has short slices.
func testLab(t *testing.T) *lab {
	t.Helper()
	p := pace{slice: 200 * time.Millisecond, lead: 50 * time.Millisecond, rounds: 1, direct: 1,
		settle: 10 * time.Millisecond, memory: 1}
	l, err := openLab(t.Context(), p, t.Output())
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, l.close()) })
	return l
}

// fake returns a contender that does something wrong.
func fake(t *testing.T, l *lab, wrong string) *contender {
	t.Helper()
	list, err := l.contenders(t.Context(), []peer{{
		name: "fake", version: wrong, binary: os.Args[0],
		args: func(e *load.Engines) []string {
			return []string{"-prefill", "http://" + e.Prefill[0], "-decode", "http://" + e.Decode[0]}
		},
	}})
	require.NoError(t, err)
	c := list[0]
	c.recipe.env = []string{fakePeer + "=" + wrong}
	plain := c.fleet
	c.fleet = func(s site) recipe {
		r := plain(s)
		r.env = c.recipe.env
		return r
	}
	return c
}

func TestAPeersWrongResponsesAreCountedAndShown(t *testing.T) {
	l := testLab(t)
	c := fake(t, l, "lies")
	s := l.ensure(t.Context(), c)
	require.NoError(t, l.takePeer(t.Context(), scenarios[0], c, &s))
	require.Empty(t, s.why)
	require.Len(t, s.slices, 1, "its figures are there, too")
	assert.Positive(t, s.slices[0].cost())
	assert.Positive(t, s.failed)
	assert.InDelta(t, 0.1, float64(s.failed)/float64(s.asked), 0.05)
	assert.Contains(t, rival{series: s, ratios: []float64{2}}.cell(), "**2.000** (2.000 to 2.000); wrong: ")
	assert.Contains(t, rival{series: s}.cell(), "(client: the response is not what the engine said)")
	_, n := l.board.Faults()
	assert.Zero(t, n, "its faults are not pdkit's")
}

func TestAPeerThatAnswersRightHasNoFaults(t *testing.T) {
	l := testLab(t)
	c := fake(t, l, "nothing")
	s := l.ensure(t.Context(), c)
	require.NoError(t, l.takePeer(t.Context(), scenarios[0], c, &s))
	assert.Zero(t, s.failed, s.reason)
	assert.Positive(t, s.asked)
}

func TestAPeerThatEndsIsShownAndStartedAgain(t *testing.T) {
	l := testLab(t)
	c := fake(t, l, "ends")
	s := l.ensure(t.Context(), c)
	for range 2 {
		require.NoError(t, l.takePeer(t.Context(), scenarios[0], c, &s))
	}
	assert.Contains(t, rival{series: s}.cell(), "– ended: exit status 4")
	assert.Empty(t, s.slices)
	again := l.ensure(t.Context(), c)
	assert.Empty(t, again.why)
	assert.False(t, c.program.Ended())
}

func TestAPeerThatDoesNotStartIsShown(t *testing.T) {
	l := testLab(t)
	c := fake(t, l, "nothing")
	c.recipe.binary = filepath.Join(t.TempDir(), "missing")
	s := l.ensure(t.Context(), c)
	require.NoError(t, l.takePeer(t.Context(), scenarios[0], c, &s))
	assert.Contains(t, rival{series: s}.cell(), "– does not start: ")
	assert.NotEmpty(t, l.peerFootprint(t.Context(), c).why)
}

func TestAPeerThatEndsWhileItRegistersIsNotWaitedFor(t *testing.T) {
	l := testLab(t)
	c := fake(t, l, "nothing")
	c.recipe.args = func(string) ([]string, error) { return []string{"-nonsense"}, nil }
	c.recipe.register = func(ctx context.Context, _ string) error {
		<-ctx.Done()
		return ctx.Err()
	}
	s := l.ensure(t.Context(), c)
	assert.Contains(t, s.why, "ended before it answered: exit status 3")
}

func TestAPeerWithManyEndpointsIsComparedWithItself(t *testing.T) {
	l := testLab(t)
	c := fake(t, l, "nothing")
	r, err := l.peerFleet(t.Context(), fleetScenario(6), c, 6)
	require.NoError(t, err)
	assert.Empty(t, r.why)
	assert.Len(t, r.ratios, 2)
	assert.Zero(t, r.failed, r.reason)
	assert.False(t, c.program.Ended())

	c.recipe.binary = filepath.Join(t.TempDir(), "missing")
	require.NoError(t, c.program.stop())
	r, err = l.peerFleet(t.Context(), fleetScenario(6), c, 6)
	require.NoError(t, err)
	assert.Contains(t, r.cell(), "– with two endpoints: does not start")
}

func TestPeersAreFoundWithTheirVersions(t *testing.T) {
	dir := t.TempDir()
	_, err := findPeers(dir)
	require.ErrorContains(t, err, "install.sh")
	for _, name := range []string{
		"bin/vllm-router", "lib/python3.11/site-packages/vllm_router-0.1.17.dist-info/METADATA",
		"lib/python3.11/site-packages/vllm_router_extra-9.dist-info/METADATA",
	} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, nil, 0o600))
	}
	found, err := findPeers(dir)
	require.NoError(t, err)
	require.Len(t, found, 1)
	assert.Equal(t, "vllm-router 0.1.17", found[0].title())
	none, err := findPeers("")
	require.NoError(t, err)
	assert.Empty(t, none)
}

func TestArgumentsNameAllEnginesAndBothAddresses(t *testing.T) {
	engines := &load.Engines{Prefill: []string{"p1", "p2"}, Decode: []string{"d1", "d2"}}
	for _, p := range knownPeers {
		args, err := p.recipe(site{engines: engines}).args("127.0.0.1:99")
		require.NoError(t, err)
		text := strings.Join(args, " ")
		assert.Contains(t, text, "--host 127.0.0.1 --port 99 --prometheus-host 127.0.0.1 --prometheus-port ")
		assert.Contains(t, text, "--policy round_robin")
		assert.Equal(t, p.register == nil, strings.Contains(text, "--prefill http://p1 --prefill http://p2 "+
			"--decode http://d1 --decode http://d2"))
	}
}

// Real peers are not installed in CI: they take 240 MB.
func TestRealPeersAnswerRight(t *testing.T) {
	dir := "../../.tools/peers"
	peers, err := findPeers(dir)
	if err != nil {
		t.Skip(err)
	}
	l := testLab(t)
	list, err := l.contenders(t.Context(), peers)
	require.NoError(t, err)
	stream := scenarios[6]
	stream.chunks = 100
	for _, c := range list {
		for _, s := range []scenario{scenarios[0], stream} {
			got := l.ensure(t.Context(), c)
			require.NoError(t, l.takePeer(t.Context(), s, c, &got))
			assert.Empty(t, got.why, got.name)
			assert.Zero(t, got.failed, "%s: %s", got.name, got.reason)
			assert.Positive(t, got.asked, got.name)
		}
	}
}
