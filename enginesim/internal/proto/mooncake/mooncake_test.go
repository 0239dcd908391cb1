// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var mooncakes = simtest.Of("mooncake")

const (
	patience      = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
	bootstrapPort = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
)

// query asks a bootstrap server.
func query(c *simtest.Client, e *enginesim.Engine) simtest.Response {
	c.T.Helper()
	return c.Fetch(e.Bootstrap() + "/query")
}

func engineOf(s *simtest.Scene, rank string) string {
	s.T.Helper()
	a := query(s.Client, s.P)
	require.NoError(s.T, a.Err)
	require.Equal(s.T, 200, a.Status)
	return gjson.Get(a.Body, rank+".engine_id").String()
}

// mooncakeLegs are the two legs of a pair, as recorded (docs/protocols/mooncake.md, recording 01).
func mooncakeLegs(s *simtest.Scene, body simtest.Obj, id string) (prefill, decode simtest.Obj) {
	prefill = simtest.With(simtest.Leg(body, simtest.Obj{"do_remote_decode": true, "do_remote_prefill": false,
		"transfer_id": id}), simtest.Obj{"max_tokens": 1, "stream": false})
	return prefill, simtest.Leg(body, simtest.Obj{"do_remote_decode": false, "do_remote_prefill": true,
		"remote_bootstrap_addr": s.P.Bootstrap(), "remote_engine_id": engineOf(s, "0"), "transfer_id": id})
}

// params are the parameters of a leg.
func params(leg simtest.Obj) simtest.Obj { return leg["kv_transfer_params"].(simtest.Obj) }

func mooncakeRight(s *simtest.Scene, body simtest.Obj, p, d simtest.Response) {
	s.T.Helper()
	require.Equal(s.T, 200, p.Status, p.Body)
	assert.Equal(s.T, gjson.Null, p.Get("kv_transfer_params").Type, "P says nothing of the transfer")
	s.Right(body, d)
	assert.EqualValues(s.T, 240, d.Get("usage.prompt_tokens_details.cached_tokens").Int(), "unlike NIXL")
}

// mooncakePair runs a pair whose legs go out at once.
func mooncakePair(s *simtest.Scene, body simtest.Obj, id string) {
	s.T.Helper()
	prefill, decode := mooncakeLegs(s, body, id)
	p, d := s.Both("both at once", prefill, decode)
	mooncakeRight(s, body, p, d)
}

// Either leg may come first, also long before the other (docs/protocols/mooncake.md, recordings 01, 03, 04).
func TestMooncakeLegsInAnyOrder(t *testing.T) {
	for _, order := range simtest.Orders {
		t.Run(order, func(t *testing.T) {
			s := simtest.New(t, mooncakes)
			body := simtest.Completion(order)
			prefill, decode := mooncakeLegs(s, body, "xfer-1")
			p, d := s.Both(order, prefill, decode)
			mooncakeRight(s, body, p, d)
			stats := s.D.Stats()
			assert.EqualValues(t, 240, stats.ExternalKVTransfer)
			assert.Zero(t, stats.LocalCompute)
			simtest.WaitFor(t, "P is the writer, and counts", func() bool {
				return s.P.Stats().BytesTransferred == (240+simtest.Block-1)/simtest.Block*simtest.Block*16
			})
			assert.Zero(t, stats.BytesTransferred)
			s.Clean()
			metrics := s.Get(s.D, "/metrics").Body
			assert.Contains(t, metrics, `source="external_kv_transfer"} 240.0`)
			assert.NotContains(t, metrics, "nixl", "no metric of its own (docs/protocols/mooncake.md §5)")
		})
	}
}

func TestMooncakeStreams(t *testing.T) {
	s := simtest.New(t, mooncakes)
	body := simtest.Completion("stream")
	prefill, decode := mooncakeLegs(s, body, "xfer-1")
	d := s.AskLater(s.D, simtest.Streamed(decode))
	p := s.Ask(s.P, simtest.Streamed(prefill))
	require.Equal(t, 200, p.Status, "a streamed prefill works too (06)")
	assert.Equal(t, s.Alone(body), (<-d).StreamText())
}

// The bootstrap server's address stays, the engine's id is new at each start (docs/protocols/mooncake.md, recording
// 00).
func TestMooncakeBootstrapServer(t *testing.T) {
	s := simtest.New(t, mooncakes, simtest.OwnPorts(t, bootstrapPort))
	a := query(s.Client, s.P)
	assert.Equal(t, "application/json", a.Header.Get("Content-Type"))
	assert.Equal(t, `{"0":{"engine_id":"`+s.P.EngineID()+`","worker_addr":{"0":{"0":"tcp://`+s.P.SideChannel()+`"}}}}`,
		a.Body)
	assert.Empty(t, s.D.Bootstrap(), "a kv_consumer has none")
	assert.Equal(t, 404, s.Fetch(s.P.Bootstrap()+"/else").Status)
	address, id := s.P.Bootstrap(), s.P.EngineID()
	s.HTTP.CloseIdleConnections() // a POST is not sent again
	require.NoError(t, s.P.Restart())
	assert.Equal(t, address, s.P.Bootstrap())
	assert.NotEqual(t, id, engineOf(s, "0"))
	mooncakePair(s, simtest.Completion("after"), "xfer-1")
}

// An engine id that the bootstrap server does not know fails at once (docs/protocols/mooncake.md, recording 09).
func TestMooncakeUnknownEngine(t *testing.T) {
	for policy, computed := range map[string]int64{enginesim.LoadFailureFail: 0, enginesim.LoadFailureRecompute: 240} {
		s := simtest.New(t, mooncakes, func(_, d *enginesim.Config) { d.LoadFailure = policy })
		_, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
		params(decode)["remote_engine_id"] = "nobody"
		s.LoadFails(policy, simtest.Completion("x"), s.Ask(s.D, decode))
		assert.Equal(t, computed, s.D.Stats().LocalCompute)
		s.Alive(s.D)
		mooncakePair(s, simtest.Completion("y"), "xfer-2")
	}
}

// D waits in silence where nobody listens, and where P is gone that it knew (docs/protocols/mooncake.md, recordings 10,
// 16).
func TestMooncakeWaitsForEnginesThatAreGone(t *testing.T) {
	t.Run("bootstrap address closed", func(t *testing.T) {
		s := simtest.New(t, mooncakes)
		_, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
		params(decode)["remote_bootstrap_addr"] = "http://127.0.0.1:1"
		s.Waits(decode)()
		s.Alive(s.D)
	})
	t.Run("P killed", func(t *testing.T) {
		s := simtest.New(t, mooncakes, simtest.OwnPorts(t, bootstrapPort))
		_, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
		leave := s.Waits(decode)
		s.P.Kill()
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, 1, s.D.Stats().Waiting)
		leave()
		s.Alive(s.D)
	})
	t.Run("the id of an engine that restarted", func(t *testing.T) {
		s := simtest.New(t, mooncakes, simtest.OwnPorts(t, bootstrapPort))
		mooncakePair(s, simtest.Completion("x"), "xfer-1")
		prefill, decode := mooncakeLegs(s, simtest.Completion("y"), "xfer-2")
		s.HTTP.CloseIdleConnections() // a POST is not sent again
		require.NoError(t, s.P.Restart())
		require.Equal(t, 200, s.Ask(s.P, prefill).Status)
		s.Waits(decode)()
		s.Alive(s.D)
	})
}

// A decode without what names P waits, and its abort kills D, if it has the id that makes D tell P
// (docs/protocols/mooncake.md, recording 15).
func TestMooncakeIncompleteParams(t *testing.T) {
	for key, kills := range map[string]bool{"remote_engine_id": true, "remote_bootstrap_addr": true,
		"transfer_id": false} {
		t.Run(key, func(t *testing.T) {
			s := simtest.New(t, mooncakes, simtest.OwnPorts(t))
			_, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
			delete(params(decode), key)
			s.Waits(decode)()
			if kills {
				s.Dies(s.D)
			} else {
				s.Alive(s.D)
			}
		})
	}
	t.Run("unknown keys are ignored (13)", func(t *testing.T) {
		s := simtest.New(t, mooncakes)
		body := simtest.Completion("x")
		prefill, decode := mooncakeLegs(s, body, "xfer-1")
		params(prefill)["x"], params(decode)["x"] = 1, simtest.Obj{"y": 2}
		p := s.Ask(s.P, prefill)
		mooncakeRight(s, body, p, s.Ask(s.D, decode))
	})
	t.Run("none at all: D computes (12)", func(t *testing.T) {
		s := simtest.New(t, mooncakes)
		assert.Equal(t, s.Alone(simtest.Completion("x")), s.Ask(s.D, simtest.Completion("x")).Text())
		assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
		assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
	})
}

// The roles are asserted: the other leg kills the engine core (mooncake_connector.py).
func TestMooncakeRoles(t *testing.T) {
	s := simtest.New(t, mooncakes, simtest.OwnPorts(t))
	prefill, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
	s.Kills(s.D, s.Ask(s.D, prefill))
	s.Kills(s.P, s.Ask(s.P, decode))
}

// P offers only what ended by length; D waits until P's time is over, fails then, and the next pair works
// (docs/protocols/mooncake.md, recordings 08, 19).
func TestMooncakePrefillThatOffersNothing(t *testing.T) {
	for _, name := range []string{"ends by a stop token", "is rejected", "has no transfer id"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := simtest.New(t, simtest.Of("mooncake", patience, "4"))
			body := simtest.Completion("x")
			first := s.Ask(s.O, simtest.With(body, simtest.Obj{"max_tokens": 1, "return_token_ids": true}))
			more := map[string]simtest.Obj{
				"ends by a stop token": {"stop_token_ids": []int64{first.Get("choices.0.token_ids.0").Int()}},
				"is rejected":          {"min_tokens": 5},
				"has no transfer id":   {"kv_transfer_params": simtest.Obj{"do_remote_decode": true}},
			}[name]
			prefill, decode := mooncakeLegs(s, body, "xfer-1")
			d := s.AskLater(s.D, decode)
			simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			p := s.Ask(s.P, simtest.With(prefill, more))
			if name == "is rejected" {
				assert.Equal(t, 400, p.Status)
			} else {
				assert.Equal(t, 200, p.Status, p.Body)
			}
			assert.Empty(t, d)
			a := <-d
			assert.Equal(t, 500, a.Status, a.Body)
			assert.Zero(t, s.P.Stats().PinnedBlocks)
			mooncakePair(s, simtest.Completion("y"), "xfer-2")
		})
	}
}

// One orphan stops a P with two sender's workers until its time is over, and not one with ten
// (docs/protocols/mooncake.md, recordings 17, 18).
func TestMooncakeOrphans(t *testing.T) {
	t.Run("2 workers", func(t *testing.T) {
		s := simtest.New(t, simtest.Of("mooncake", "num_workers", "2", patience, "5"))
		_, orphan := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
		s.Waits(orphan)()
		simtest.WaitFor(t, "P counts it", func() bool { return s.P.Stats().Orphans == 1 })
		time.Sleep(time.Second) // the second one's time ends so much later than the orphan's: enough to move its KV
		body := simtest.Completion("y")
		prefill, decode := mooncakeLegs(s, body, "xfer-2")
		begun := time.Now()
		d := s.AskLater(s.D, decode)
		p := s.Ask(s.P, prefill)
		assert.Equal(t, 200, p.Status)
		time.Sleep(300 * time.Millisecond)
		assert.Empty(t, d, "P's senders wait for the orphan's prompt")
		s.Alive(s.D)
		assert.Equal(t, 200, s.Get(s.P, "/health").Status)
		mooncakeRight(s, body, p, <-d)
		assert.Greater(t, time.Since(begun), 500*time.Millisecond, "until their time is over")
		assert.NoError(t, s.P.CheckKV())
	})
	t.Run("10 workers", func(t *testing.T) {
		s := simtest.New(t, mooncakes)
		_, orphan := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
		s.Waits(orphan)()
		simtest.WaitFor(t, "P counts it", func() bool { return s.P.Stats().Orphans == 1 })
		mooncakePair(s, simtest.Completion("y"), "xfer-2")
	})
}

// P is asked, and then told, although the client left while D looked for P.
func TestMooncakeOrphanOfAClientThatLeftEarly(t *testing.T) {
	s := simtest.New(t, mooncakes)
	_, orphan := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
	found := query(s.Client, s.P).Body
	asked := make(chan struct{}, 2)
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked <- struct{}{}; len(asked) == 1 {
			<-r.Context().Done()
		}
		_, _ = io.WriteString(w, found)
	}))
	defer slow.Close()
	params(orphan)["remote_bootstrap_addr"] = slow.URL
	leave := s.Waits(orphan)
	simtest.WaitFor(t, "D looks for P", func() bool { return len(asked) == 1 })
	leave()
	simtest.WaitFor(t, "P counts it", func() bool { return s.P.Stats().Orphans == 1 })
}

// A prompt that comes after D's client has left is let go, not kept.
func TestMooncakePrefillAfterTheOrphan(t *testing.T) {
	s := simtest.New(t, mooncakes)
	prefill, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
	s.Waits(decode)()
	simtest.WaitFor(t, "P knows", func() bool { return s.P.Stats().Orphans == 1 })
	require.Equal(t, 200, s.Ask(s.P, prefill).Status)
	simtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	assert.NoError(t, s.P.CheckKV())
}

// A decode that D's API refuses lets P go, and a transfer id may be used again (docs/protocols/mooncake.md, recording
// 11).
func TestMooncakeRefusedDecodeAndReusedID(t *testing.T) {
	s := simtest.New(t, mooncakes)
	prefill, decode := mooncakeLegs(s, simtest.Completion("x"), "xfer-1")
	require.Equal(t, 200, s.Ask(s.P, prefill).Status)
	assert.NotZero(t, s.P.Stats().PinnedBlocks)
	assert.Equal(t, 404, s.Ask(s.D, simtest.With(decode, simtest.Obj{"model": "other"})).Status)
	simtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	mooncakePair(s, simtest.Completion("y"), "xfer-1")
	mooncakePair(s, simtest.Completion("z"), "xfer-1")
}

// With several data-parallel ranks D must ask the one whose engine id it has, and P must have been told which
// (mooncake_connector.py).
func TestMooncakeRanks(t *testing.T) {
	s := simtest.New(t, simtest.Of("mooncake", "data_parallel_size", "3"))
	body := simtest.Completion("x")
	prefill, decode := mooncakeLegs(s, body, "xfer-1")
	params(decode)["remote_engine_id"] = engineOf(s, "2")
	require.Equal(t, 200, s.Ask(s.P, prefill, "X-data-parallel-rank", "1").Status)
	s.Waits(decode)()
	prefill, decode = mooncakeLegs(s, body, "xfer-2")
	params(decode)["remote_engine_id"] = engineOf(s, "2")
	p := s.Ask(s.P, prefill, "X-data-parallel-rank", "2")
	mooncakeRight(s, body, p, s.Ask(s.D, decode))
}

func TestMooncakeSettings(t *testing.T) {
	for _, name := range []string{"num_workers", patience, bootstrapPort, "data_parallel_size"} {
		_, err := enginesim.Start(enginesim.Config{Connector: "mooncake", Extra: map[string]string{name: "-1"}})
		require.ErrorContains(t, err, name)
	}
	lone, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	assert.Empty(t, lone.Bootstrap())
	require.NoError(t, lone.Close())
}
