// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/moriio"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func open(t testing.TB, o *moriio.Options) *moriio.Connector {
	t.Helper()
	c, err := moriio.New(o)
	require.NoError(t, err)
	return c
}

func engine(t testing.TB, rawURL string, role discovery.Role, attributes map[string]string) discovery.Endpoint {
	t.Helper()
	u, err := url.Parse(rawURL)
	require.NoError(t, err)
	return discovery.Endpoint{ID: role.String(), URL: u, Role: role, Attributes: attributes}
}

func session(t testing.TB, api connector.API, body string, p, d map[string]string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, p),
		engine(t, "http://10.0.0.6:8200", discovery.RoleDecode, d))
}

func responseOf(body string) *connector.PrefillResult {
	return &connector.PrefillResult{Status: http.StatusOK, Body: []byte(body), At: time.Now()}
}

// legs returns both legs. fromP is P's response, "" for none.
func legs(t testing.TB, c connector.KVConnector, s *connector.Session, fromP string) (p, d *connector.Leg, err error) {
	t.Helper()
	p, d = contract.NewPrefillLeg(s.Request, c.Traits()), contract.NewLeg(s.Request)
	if err = c.Prefill(context.Background(), s, p); err != nil {
		return nil, nil, err
	}
	var result *connector.PrefillResult
	if fromP != "" {
		result = responseOf(fromP)
	}
	return p, d, c.Decode(context.Background(), s, result, d)
}

func param(l *connector.Leg, name string) string {
	raw, _ := l.Current(connector.ParamsMember)
	return gjson.GetBytes(raw, name).Raw
}

func header(l *connector.Leg, name string) string {
	value := ""
	for _, h := range contract.Leg(l).Headers {
		if h.Name == name {
			value = h.Value
		}
	}
	return value
}

// Both engines find their peer by vLLM's patterns for the id (moriio_common.py), with the engine's prefix and suffix
// around it.
func TestTheIDNamesEachEnginesPeer(t *testing.T) {
	prefill, decode := regexp.MustCompile(`___prefill_addr_(.+?)___decode_addr_`),
		regexp.MustCompile(`___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$`)
	s := session(t, connector.APICompletions, `{"prompt":"x"}`,
		map[string]string{"handshakePort": "7001", "notifyPort": "7002"},
		map[string]string{"zmqAddress": "notify:9,host:fd00::1, handshake:8,new:1"})
	p, d, err := legs(t, open(t, nil), s, "")
	require.NoError(t, err)
	id := header(p, "X-Request-Id")
	assert.Equal(t, id, header(d, "X-Request-Id"))
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
	p, d, err := legs(t, open(t, &moriio.Options{TPSize: 4}),
		session(t, connector.APIChat, `{}`, map[string]string{"tpSize": "8"}, nil), "")
	require.NoError(t, err)
	for leg, want := range map[*connector.Leg]string{p: "4", d: "8"} {
		assert.Equal(t, want, param(leg, "tp_size"))
		assert.Equal(t, want, param(leg, "remote_tp_size"))
		assert.Equal(t, "1", param(leg, "remote_dp_size"))
	}
	p, _, err = legs(t, open(t, nil), session(t, connector.APIChat, `{}`, nil, nil), "")
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
			p, d, err := legs(t, open(t, k.o), session(t, connector.APIChat, `{}`, k.p, k.d), "")
			require.NoError(t, err)
			rank := header(p, "X-data-parallel-rank")
			assert.Equal(t, rank, param(d, "remote_dp_rank"), k.what)
			assert.Equal(t, "true", param(d, "is_request_leader"), "else D tells P only if its rank has P's number")
			assert.Equal(t, "true", param(d, "remote_dp_rank_override"), "else D reckons with a hash of the id")
			assert.Equal(t, strconv.Itoa(k.dSize), param(p, "remote_dp_size"))
			assert.Equal(t, strconv.Itoa(k.pSize), param(d, "remote_dp_size"))
			if k.pSize == k.dSize {
				assert.Equal(t, rank, header(d, "X-data-parallel-rank"), k.what)
			}
			seenP[rank], seenD[header(d, "X-data-parallel-rank")] = true, true
		}
		assert.Len(t, seenP, k.pSize, k.what)
		assert.Len(t, seenD, k.dSize, k.what)
	}
}

// P's blocks are flat in older releases, and a list for each cache group in newer ones. D gets them byte for byte.
func TestReadPassesBlocksAsTheyAre(t *testing.T) {
	c := open(t, &moriio.Options{Mode: moriio.ModeRead})
	for _, blocks := range []string{"[7,8]", "[ 7, 8 ]", "[[7,8]]", "[[7, 8],\n [9]]", "[[],[9007199254740993]]"} {
		s := session(t, connector.APIChat, `{}`, nil, nil)
		response, err := sjson.SetRaw(`{"kv_transfer_params":`+handoff(s)+`}`, "kv_transfer_params.remote_block_ids",
			blocks)
		require.NoError(t, err)
		_, d, err := legs(t, c, s, response)
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
			p, d, err := legs(t, open(t, k.o), session(t, connector.APIChat, `{}`, k.p, pods), "")
			require.NoError(t, err, name)
			assert.Equal(t, `["10.0.0.6","fd00::6"]`, param(p, "remote_hosts"))
			assert.Equal(t, "6 3", param(p, "remote_dp_size")+" "+param(p, "remote_dp_size_local"))
			assert.Equal(t, `["10.0.0.5"]`, param(d, "remote_hosts"))
			assert.Equal(t, "2 2", param(d, "remote_dp_size")+" "+param(d, "remote_dp_size_local"))
			assert.Contains(t, []string{"0", "1"}, header(p, "X-data-parallel-rank"), name)
			assert.Equal(t, header(p, "X-data-parallel-rank"), param(d, "remote_dp_rank"))
			assert.Contains(t, []string{"0", "1", "2"}, header(d, "X-data-parallel-rank"), name)
		}
	}
	p, d, err := legs(t, open(t, nil), session(t, connector.APIChat, `{}`, nil, nil), "")
	require.NoError(t, err)
	assert.Empty(t, param(p, "remote_hosts")+param(d, "remote_hosts")+param(d, "remote_dp_size_local"), "of one pod")

	_, _, err = legs(t, open(t, nil), session(t, connector.APIResponses, `{}`,
		map[string]string{"dpSize": "2", "dpSizeLocal": "1"}, nil), "")
	require.NoError(t, err, "a pod of one rank needs no header")
}

// What D's entry says of its pods must be complete, since P would look for D in the wrong place. P's entry need not
// name them.
func TestDsPodsMustBeNamed(t *testing.T) {
	c := open(t, nil)
	for _, pods := range []string{"", "10.0.0.6", "10.0.0.6,", "10.0.0.6,a b", "a,b,c"} {
		attributes := map[string]string{"dpSize": "4", "dpSizeLocal": "2", "pods": pods}
		faults := config.FieldErrors(c.CheckEndpoint(engine(t, "http://10.0.0.6:8200", discovery.RoleDecode,
			attributes)))
		require.Len(t, faults, 1, pods)
		assert.Equal(t, "attributes.pods", faults[0].Path)
		_, _, err := legs(t, c, session(t, connector.APIChat, `{}`, nil, attributes), "")
		var bad *attr.Error
		require.ErrorAs(t, err, &bad, pods)
	}
	require.NoError(t, c.CheckEndpoint(engine(t, "http://10.0.0.5:8100", discovery.RolePrefill,
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
	_, _, err := legs(t, open(t, nil), session(t, connector.APIResponses, `{}`, map[string]string{"dpSize": "2"}, nil),
		"")
	var bad *connector.UnsupportedError
	require.ErrorAs(t, err, &bad)
	assert.Equal(t, "X-data-parallel-rank", bad.Member)
	p, _, err := legs(t, open(t, nil), session(t, connector.APIResponses, `{}`, nil, nil), "")
	require.NoError(t, err)
	id, _ := p.Current("request_id")
	assert.Equal(t, `"`+header(p, "X-Request-Id")+`"`, string(id))
}

// Each case replaces one key of P's response; "-" removes it. The error names the key and holds no value.
func TestReadRefusesWhatDWouldReadWrongly(t *testing.T) {
	c := open(t, &moriio.Options{Mode: moriio.ModeRead})
	for key, values := range map[string][]string{
		"do_remote_prefill": {"-", "false", "null"},
		"do_remote_decode":  {"true"},
		"transfer_id":       {"-", "null", `"tx-4321"`, `""`, "4321"},
		"remote_engine_id":  {"-", "null", `""`, "4321"},
		"remote_block_ids": {"-", "null", "[]", "[[]]", `["4321"]`, `[["4321"]]`, "[-4321]", "[[-4321]]",
			"[4321.5]", "[[[4321]]]", "[4321,[4321]]", "[[4321],4321]", "{}", `"4321"`},
		"remote_dp_rank": {"1", "-4321", `"4321"`, "1.5"},
	} {
		for _, v := range values {
			s := session(t, connector.APIChat, `{}`, nil, nil)
			bad, err := sjson.Delete(handoff(s), key)
			if v != "-" {
				bad, err = sjson.SetRaw(handoff(s), key, v)
			}
			require.NoError(t, err)
			_, _, err = legs(t, c, s, `{"kv_transfer_params":`+bad+`}`)
			require.ErrorIs(t, err, connector.ErrNoTransfer, "%s=%s", key, v)
			assert.Contains(t, err.Error(), key)
			assert.NotContains(t, err.Error(), "4321")
			assert.NotContains(t, err.Error(), "10.0.0.5")
		}
	}
	s := session(t, connector.APIChat, `{}`, nil, nil)
	_, _, err := legs(t, c, s, "")
	require.ErrorIs(t, err, connector.ErrNoTransfer, "before P has answered")
	require.NoError(t, c.CheckPrefill(s, responseOf(`{}`)), "that is Decode's part")
}

// In WRITE, P writes only if it stopped because of the length, and its response says that. Otherwise D would wait for
// ever.
func TestWriteWantsPToHaveEndedByLength(t *testing.T) {
	c, s := open(t, nil), session(t, connector.APIMessages, `{"max_tokens":9}`, nil, nil)
	good := `{"kv_transfer_params":` + handoff(s) + `}`
	require.NoError(t, c.CheckPrefill(s, responseOf(good)))
	_, d, err := legs(t, c, s, good)
	require.NoError(t, err, "one after the other")
	assert.Equal(t, "null", param(d, "remote_block_ids"), "P writes all the same")
	for _, bad := range []string{``, `{}`, `{"kv_transfer_params":null}`, `{"kv_transfer_params":{}}`,
		strings.Replace(good, "tx-", "tx-0", 1)} {
		require.ErrorIs(t, c.CheckPrefill(s, responseOf(bad)), connector.ErrNoTransfer, bad)
		_, _, err = legs(t, c, s, bad+" ")
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
			e := engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, map[string]string{name: v})
			faults := config.FieldErrors(c.CheckEndpoint(e))
			require.Len(t, faults, 1, "%s=%s", name, v)
			assert.Equal(t, "attributes."+name, faults[0].Path)
			_, _, err := legs(t, c, session(t, connector.APIChat, `{}`, map[string]string{name: v}, nil), "")
			var bad *attr.Error
			require.ErrorAs(t, err, &bad, "%s=%s", name, v)
			assert.Equal(t, name, bad.Attribute)
			_, err = c.Engine(e)
			require.Error(t, err)
		}
	}
	require.NoError(t, c.CheckEndpoint(engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, nil)))
	require.Error(t, c.CheckEndpoint(discovery.Endpoint{ID: "x"}), "nowhere")
}

func TestAbilities(t *testing.T) {
	write, err := connector.Open(config.Spec{Type: "MoRIIOConnector"})
	require.NoError(t, err)
	read, err := connector.Open(
		config.Spec{Type: "moriio", Config: json.RawMessage(`{"mode":"read","deferTimeout":"90s"}`)},
	)
	require.NoError(t, err)
	assert.Equal(t, connector.Together, write.Traits().Order, "the engines' default is WRITE")
	assert.Equal(t, connector.PrefillThenDecode, read.Traits().Order)
	for c, orders := range map[connector.KVConnector][]connector.Order{write: {connector.PrefillThenDecode},
		read: nil} {
		assert.Equal(t, orders, c.Traits().OtherOrders)
		assert.True(t, c.Traits().Serving.PairOnly)
		assert.True(t, c.Traits().Ending.Orphans)
	}
	assert.Equal(t, 90*time.Second, read.Traits().Handoff.Lease)
	var zero moriio.Connector
	assert.Equal(t, time.Minute, zero.Traits().Handoff.Lease, "defer_timeout")
	assert.Equal(t, "n", uncarried.Member(open(t, nil), session(t, connector.APIChat, `{"n":2}`, nil, nil).Request))
	assert.Equal(
		t, connector.ParamsMember, uncarried.Member(open(t, nil),
			session(t, connector.APISGLang, `{"text":"a"}`, nil, nil).Request),
	)
}

// For any response of P, nothing panics. Decode returns ErrNoTransfer, or a leg that is JSON and has this session's id
// and blocks.
func FuzzAnswer(f *testing.F) {
	c, s := open(f, &moriio.Options{Mode: moriio.ModeRead}), session(f, connector.APIChat, `{"messages":[]}`, nil, nil)
	w := open(f, nil)
	for _, seed := range []string{`{"kv_transfer_params":` + handoff(s) + `}`,
		`{"kv_transfer_params":{"remote_block_ids":[[1]]}}`, `{"kv_transfer_params":null}`, ``, `{}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, response []byte) {
		p := responseOf(string(response))
		written := w.CheckPrefill(s, p)
		d := contract.NewLeg(s.Request)
		if err := c.Decode(t.Context(), s, p, d); err != nil {
			require.ErrorIs(t, err, connector.ErrNoTransfer)
			return
		}
		require.NoError(t, written, "what may be read was written")
		body, err := contract.Body(d)
		require.NoError(t, err)
		require.True(t, json.Valid(body), "%s", body)
		var h struct {
			Blocks []any  `json:"remote_block_ids"`
			Engine string `json:"remote_engine_id"`
			ID     string `json:"transfer_id"`
			Rank   *int   `json:"remote_dp_rank"`
		}
		require.NoError(t, json.Unmarshal([]byte(gjson.GetBytes(body, "kv_transfer_params").Raw), &h))
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
		for _, announced := range []string{"", mode} {
			_, _, err := legs(
				t, c, session(t, connector.APICompletions, `{"prompt":"x"}`, map[string]string{"mode": announced}, nil),
				"",
			)
			if err != nil { // read mode needs P's response, and there is none
				require.ErrorIs(t, err, connector.ErrNoTransfer, announced)
			}
		}
		_, _, err := legs(
			t, c, session(t, connector.APICompletions, `{"prompt":"x"}`, map[string]string{"mode": other}, nil), "",
		)
		var bad *attr.Error
		require.ErrorAs(t, err, &bad)
		assert.Equal(t, "mode", bad.Attribute)
	}
}
