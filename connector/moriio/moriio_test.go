// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"encoding/json"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/moriio"
	"github.com/pdkit/pdkit/discovery"
)

func open(t testing.TB, o *moriio.Options) *moriio.Connector { return play.New(t, moriio.New, o) }

// legs returns both legs. fromP is P's response, "" for none.
func legs(c connector.KVConnector, s *connector.Session, fromP string) (p, d play.Leg, err error) {
	if p, err = play.TryPrefill(c, s); err != nil {
		return p, d, err
	}
	var result *connector.PrefillResult
	if fromP != "" {
		result = play.Response(fromP)
	}
	d, err = play.TryDecode(c, s, result)
	return p, d, err
}

func param(l play.Leg, name string) string { return gjson.Get(l.Body, "kv_transfer_params."+name).Raw }

// Both engines find their peer by vLLM's patterns for the id (moriio_common.py), with the engine's prefix and suffix
// around it.
func TestTheIDNamesEachEnginesPeer(t *testing.T) {
	prefill, decode := regexp.MustCompile(`___prefill_addr_(.+?)___decode_addr_`),
		regexp.MustCompile(`___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$`)
	s := play.Session(t, connector.APICompletions, `{"prompt":"x"}`,
		map[string]string{"handshakePort": "7001", "notifyPort": "7002"},
		map[string]string{"zmqAddress": "notify:9,host:fd00::1, handshake:8,new:1"})
	p, d, err := legs(open(t, nil), s, "")
	require.NoError(t, err)
	id := p.Header.Get("X-Request-Id")
	assert.Equal(t, id, d.Header.Get("X-Request-Id"))
	internal := "cmpl-" + id + "-0-1a2b3c4d"
	assert.Equal(t, "host:10.0.0.5,handshake:7001,notify:7002", prefill.FindStringSubmatch(internal)[1])
	assert.Equal(t, "host:fd00::1,handshake:8,notify:9", decode.FindStringSubmatch(internal)[1],
		"written anew from its parts")
	assert.True(t, strings.HasSuffix(id, "_"+s.ID))
	assert.Equal(t, `"fd00::1"`, param(p, "remote_host"))
	assert.Equal(t, "8", param(p, "remote_handshake_port"))
	assert.Equal(t, "7002", param(d, "remote_notify_port"))
	assert.Equal(t, `"tx-`+s.UUID()+`"`, param(p, "transfer_id"))
	assert.Equal(t, param(p, "transfer_id"), param(d, "transfer_id"))
}

// Sizes that are not configured are left out, and engines take their own.
func TestSizesAreThePeers(t *testing.T) {
	p, d, err := legs(open(t, &moriio.Options{TPSize: 4}),
		play.Session(t, connector.APIChat, `{}`, map[string]string{"tpSize": "8"}), "")
	require.NoError(t, err)
	for want, leg := range map[string]play.Leg{"4": p, "8": d} {
		assert.Equal(t, want, param(leg, "tp_size"))
		assert.Equal(t, want, param(leg, "remote_tp_size"))
		assert.Equal(t, "1", param(leg, "remote_dp_size"))
	}
	p, _, err = legs(open(t, nil), play.Session(t, connector.APIChat, `{}`), "")
	require.NoError(t, err)
	assert.Empty(t, param(p, "tp_size")+param(p, "remote_tp_size"))
}

// P's rank is one of its ranks, fixed for the session, and D learns it. D's rank is the same if it has as many.
func TestRanks(t *testing.T) {
	for _, k := range []struct {
		what         string
		o            *moriio.Options
		p, d         map[string]string
		pSize, dSize int
	}{
		{"by attributes", nil, map[string]string{"dpSize": "4"}, map[string]string{"dpSize": "4"}, 4, 4},
		{"by the settings", &moriio.Options{DPSize: 4}, nil, nil, 4, 4},
		{"different", nil, map[string]string{"dpSize": "2"}, map[string]string{"dpSize": "6"}, 2, 6},
		{"none", nil, nil, nil, 1, 1},
	} {
		seenP, seenD := map[string]bool{}, map[string]bool{}
		for range 200 {
			p, d, err := legs(open(t, k.o), play.Session(t, connector.APIChat, `{}`, k.p, k.d), "")
			require.NoError(t, err)
			rank := p.Header.Get("X-data-parallel-rank")
			assert.Equal(t, rank, param(d, "remote_dp_rank"), k.what)
			assert.Equal(t, "true", param(d, "is_request_leader"), "else D tells P only if its rank has P's number")
			assert.Equal(t, "true", param(d, "remote_dp_rank_override"), "else D reckons with a hash of the id")
			assert.Equal(t, strconv.Itoa(k.dSize), param(p, "remote_dp_size"))
			assert.Equal(t, strconv.Itoa(k.pSize), param(d, "remote_dp_size"))
			if k.pSize == k.dSize {
				assert.Equal(t, rank, d.Header.Get("X-data-parallel-rank"), k.what)
			}
			seenP[rank], seenD[d.Header.Get("X-data-parallel-rank")] = true, true
		}
		assert.Len(t, seenP, k.pSize, k.what)
		assert.Len(t, seenD, k.dSize, k.what)
	}
}

// P's blocks are flat in older releases, and a list for each cache group in newer ones. D gets them byte for byte.
func TestReadPassesBlocksAsTheyAre(t *testing.T) {
	c := open(t, &moriio.Options{Mode: moriio.ModeRead})
	for _, blocks := range []string{"[7,8]", "[ 7, 8 ]", "[[7,8]]", "[[7, 8],\n [9]]", "[[],[9007199254740993]]"} {
		s := play.Session(t, connector.APIChat, `{}`)
		response, err := sjson.SetRaw(`{"kv_transfer_params":`+handoff(s)+`}`, "kv_transfer_params.remote_block_ids",
			blocks)
		require.NoError(t, err)
		_, d, err := legs(c, s, response)
		require.NoError(t, err, blocks)
		assert.Equal(t, blocks, param(d, "remote_block_ids"))
	}
}

// Of an engine of several pods, P learns the hosts of all, since D tells it a rank among those of all pods. D learns
// only the pod behind P's URL, and ranks are the pod's. The setting gives the pod's ranks where no attribute does.
func TestSeveralPods(t *testing.T) {
	pods := map[string]string{"dpSize": "6", "dpSizeLocal": "3", "pods": "10.0.0.6, fd00::6"}
	for name, k := range map[string]struct {
		o *moriio.Options
		p map[string]string
	}{
		"attributes":      {nil, map[string]string{"dpSize": "4", "dpSizeLocal": "2"}},
		"settings":        {&moriio.Options{DPSize: 4, DPSizeLocal: 2}, nil},
		"P's pods, named": {nil, map[string]string{"dpSize": "3", "dpSizeLocal": "2", "pods": "a,b"}},
	} {
		for range 50 {
			p, d, err := legs(open(t, k.o), play.Session(t, connector.APIChat, `{}`, k.p, pods), "")
			require.NoError(t, err, name)
			assert.Equal(t, `["10.0.0.6","fd00::6"]`, param(p, "remote_hosts"))
			assert.Equal(t, "6 3", param(p, "remote_dp_size")+" "+param(p, "remote_dp_size_local"))
			assert.Equal(t, `["10.0.0.5"]`, param(d, "remote_hosts"))
			assert.Equal(t, "2 2", param(d, "remote_dp_size")+" "+param(d, "remote_dp_size_local"))
			assert.Contains(t, []string{"0", "1"}, p.Header.Get("X-data-parallel-rank"), name)
			assert.Equal(t, p.Header.Get("X-data-parallel-rank"), param(d, "remote_dp_rank"))
			assert.Contains(t, []string{"0", "1", "2"}, d.Header.Get("X-data-parallel-rank"), name)
		}
	}
	p, d, err := legs(open(t, nil), play.Session(t, connector.APIChat, `{}`), "")
	require.NoError(t, err)
	assert.Empty(t, param(p, "remote_hosts")+param(d, "remote_hosts")+param(d, "remote_dp_size_local"), "of one pod")

	_, _, err = legs(open(t, nil), play.Session(t, connector.APIResponses, `{}`,
		map[string]string{"dpSize": "2", "dpSizeLocal": "1"}), "")
	require.NoError(t, err, "a pod of one rank needs no header")
}

// What D's entry says of its pods must be complete, since P would look for D in the wrong place. P's entry need not
// name them.
func TestDsPodsMustBeNamed(t *testing.T) {
	c := open(t, nil)
	for _, pods := range []string{"", "10.0.0.6", "10.0.0.6,", "10.0.0.6,a b", "a,b,c"} {
		attributes := map[string]string{"dpSize": "4", "dpSizeLocal": "2", "pods": pods}
		faults := config.FieldErrors(c.CheckEndpoint(play.Engine(t, "http://10.0.0.6:8200", discovery.RoleDecode,
			attributes)))
		require.Len(t, faults, 1, pods)
		assert.Equal(t, "attributes.pods", faults[0].Path)
		_, _, err := legs(c, play.Session(t, connector.APIChat, `{}`, nil, attributes), "")
		var bad *attr.Error
		require.ErrorAs(t, err, &bad, pods)
	}
	require.NoError(t, c.CheckEndpoint(play.Engine(t, "http://10.0.0.5:8100", discovery.RolePrefill,
		map[string]string{"dpSize": "4", "dpSizeLocal": "2"})))
}

// A decode engine serves a request alone in mode write from vLLM 0.32 on, in mode read from 0.33 on. A release that is
// not told may be older.
func TestReleasesWhoseDecodeEnginesServeAlone(t *testing.T) {
	for version, pairOnly := range map[string][2]bool{"": {true, true}, "0.28": {true, true}, "0.31.2": {true, true},
		"0.32.0": {false, true}, "0.33.0": {false, false}, "v1.0": {false, false}} {
		for i, mode := range []string{moriio.ModeWrite, moriio.ModeRead} {
			c := open(t, &moriio.Options{Mode: mode, EngineVersion: version})
			assert.Equal(t, pairOnly[i], c.Traits().Serving.PairOnly, "%s %q", mode, version)
		}
	}
	_, err := moriio.New(&moriio.Options{EngineVersion: "newest"})
	faults := config.FieldErrors(err)
	require.Len(t, faults, 1)
	assert.Equal(t, "engineVersion", faults[0].Path)
}

// /v1/responses ignores the header that names the rank, and with a wrong rank KV goes to the wrong memory.
func TestResponsesNeedAPWithoutRanks(t *testing.T) {
	_, _, err := legs(open(t, nil), play.Session(t, connector.APIResponses, `{}`, map[string]string{"dpSize": "2"}),
		"")
	var bad *connector.UnsupportedError
	require.ErrorAs(t, err, &bad)
	assert.Equal(t, "X-data-parallel-rank", bad.Member)
	_, _, err = legs(open(t, nil), play.Session(t, connector.APIResponses, `{}`), "")
	require.NoError(t, err)
}

func TestReadRefusesWhatDWouldReadWrongly(t *testing.T) {
	c, s := open(t, &moriio.Options{Mode: moriio.ModeRead}), play.Session(t, connector.APIChat, `{}`)
	play.Spoilt(t, handoff(s), map[string][]string{
		"do_remote_prefill": {"-", "false", "null"},
		"do_remote_decode":  {"true"},
		"transfer_id":       {"-", "null", `"tx-4321"`, `""`, "4321"},
		"remote_engine_id":  {"-", "null", `""`, "4321"},
		"remote_block_ids": {"-", "null", "[]", "[[]]", `["4321"]`, `[["4321"]]`, "[-4321]", "[[-4321]]",
			"[4321.5]", "[[[4321]]]", "[4321,[4321]]", "[[4321],4321]", "{}", `"4321"`},
		"remote_dp_rank": {"1", "-4321", `"4321"`, "1.5"},
	}, func(bad string) error {
		_, _, err := legs(c, s, `{"kv_transfer_params":`+bad+`}`)
		return err
	}, "10.0.0.5")
	_, _, err := legs(c, s, "")
	require.ErrorIs(t, err, connector.ErrNoTransfer, "before P has answered")
	require.NoError(t, c.CheckPrefill(s, play.Response(`{}`)), "that is Decode's part")
}

// In WRITE, P writes only if it stopped because of the length, and its response says that. Otherwise D would wait for
// ever.
func TestWriteWantsPToHaveEndedByLength(t *testing.T) {
	c, s := open(t, nil), play.Session(t, connector.APIMessages, `{"max_tokens":9}`)
	good := `{"kv_transfer_params":` + handoff(s) + `}`
	require.NoError(t, c.CheckPrefill(s, play.Response(good)))
	_, d, err := legs(c, s, good)
	require.NoError(t, err, "one after the other")
	assert.Equal(t, "null", param(d, "remote_block_ids"), "P writes all the same")
	for _, bad := range []string{``, `{}`, `{"kv_transfer_params":null}`, `{"kv_transfer_params":{}}`,
		strings.Replace(good, "tx-", "tx-0", 1)} {
		require.ErrorIs(t, c.CheckPrefill(s, play.Response(bad)), connector.ErrNoTransfer, bad)
		_, _, err = legs(c, s, bad+" ")
		require.ErrorIs(t, err, connector.ErrNoTransfer, bad)
	}
}

func TestEndpointsThatCannotBeAddressed(t *testing.T) {
	c := open(t, nil)
	for name, values := range map[string][]string{
		"handshakePort": {"0", "x", "65536"}, "notifyPort": {"-1"}, "tpSize": {"0", "x"}, "dpSize": {"0", "65537"},
		"dpSizeLocal": {"0", "2", "x"},
		"zmqAddress": {"10.0.0.5:6301", "host:10.0.0.5,handshake:6301", "host:,handshake:1,notify:2",
			"host:a b,handshake:1,notify:2", "host:h,handshake:0,notify:2",
			"host:h,handshake:1,notify:x", "host:h___decode_addr_h,handshake:1,notify:2",
			"host:h\r\nX-Evil,handshake:1,notify:2"},
	} {
		for _, v := range values {
			e := play.Engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, map[string]string{name: v})
			faults := config.FieldErrors(c.CheckEndpoint(e))
			require.Len(t, faults, 1, "%s=%s", name, v)
			assert.Equal(t, "attributes."+name, faults[0].Path)
			_, _, err := legs(c, play.Session(t, connector.APIChat, `{}`, map[string]string{name: v}), "")
			var bad *attr.Error
			require.ErrorAs(t, err, &bad, "%s=%s", name, v)
			assert.Equal(t, name, bad.Attribute)
			_, err = c.Engine(e)
			require.Error(t, err)
		}
	}
	require.NoError(t, c.CheckEndpoint(play.Engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, nil)))
	require.Error(t, c.CheckEndpoint(discovery.Endpoint{ID: "x"}), "nowhere")
}

// For any response of P, nothing panics. Decode returns ErrNoTransfer, or a leg that is JSON and has this session's id
// and blocks.
func FuzzAnswer(f *testing.F) {
	c, s := open(f, &moriio.Options{Mode: moriio.ModeRead}), play.Session(f, connector.APIChat, `{"messages":[]}`)
	w := open(f, nil)
	for _, seed := range []string{`{"kv_transfer_params":` + handoff(s) + `}`,
		`{"kv_transfer_params":{"remote_block_ids":[[1]]}}`, `{"kv_transfer_params":null}`, ``, `{}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, response []byte) {
		p := play.Response(string(response))
		written := w.CheckPrefill(s, p)
		d, err := play.TryDecode(c, s, p)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrNoTransfer)
			return
		}
		require.NoError(t, written, "what may be read was written")
		require.True(t, json.Valid([]byte(d.Body)), "%s", d.Body)
		var h struct {
			Blocks []any  `json:"remote_block_ids"`
			Engine string `json:"remote_engine_id"`
			ID     string `json:"transfer_id"`
			Rank   *int   `json:"remote_dp_rank"`
		}
		require.NoError(t, json.Unmarshal([]byte(gjson.Get(d.Body, "kv_transfer_params").Raw), &h))
		require.NotEmpty(t, h.Blocks)
		require.NotEmpty(t, h.Engine)
		require.Equal(t, "tx-"+s.UUID(), h.ID)
		require.Zero(t, *h.Rank)
	})
}

// Engines announce their mode. Engines of the other mode would wait for notices that nobody sends, or use KV that
// nobody wrote.
func TestAnEngineOfTheOtherModeIsPassedOver(t *testing.T) {
	for mode, other := range map[string]string{"write": "read", "read": "write"} {
		c := open(t, &moriio.Options{Mode: mode})
		of := func(announced string) error {
			_, _, err := legs(c, play.Session(t, connector.APICompletions, `{"prompt":"x"}`,
				map[string]string{"mode": announced}), "")
			return err
		}
		for _, announced := range []string{"", mode} {
			if err := of(announced); err != nil { // read mode needs P's response, and there is none
				require.ErrorIs(t, err, connector.ErrNoTransfer, announced)
			}
		}
		var bad *attr.Error
		require.ErrorAs(t, of(other), &bad)
		assert.Equal(t, "mode", bad.Attribute)
	}
}
