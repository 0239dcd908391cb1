// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	_ "github.com/pdkit/pdkit/connector/nixl"          // a child with a handoff
	_ "github.com/pdkit/pdkit/connector/p2pnccl"       // a child that needs attributes
	_ "github.com/pdkit/pdkit/connector/sharedstorage" // a child that is a store

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/multi"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func tryOpen(settings string) (connector.KVConnector, error) {
	return connector.Open(config.Spec{Type: "MultiConnector", Config: json.RawMessage(settings)})
}

func open(t testing.TB, settings string) connector.KVConnector {
	return play.Open(t, multi.Name, settings)
}

const nixlAndStore = `{"connectors":[{"type":"nixl","config":{"leaseDuration":"9s"}},` +
	`{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
	`"kv_connector_extra_config":{"shared_storage_path":"local_storage"}}]}`

func TestAStoreDoesNotMakeUpForAMissingHandoff(t *testing.T) {
	s := play.Session(t, connector.APICompletions, `{"prompt":"x","max_tokens":9}`)
	_, err := play.TryDecode(open(t, nixlAndStore), s, play.Response(`{}`))
	require.ErrorIs(t, err, connector.ErrNoTransfer, "the engine would not ask it")
}

func TestAbilitiesOfTheChildren(t *testing.T) {
	c := open(t, nixlAndStore)
	checker, ok := connector.As[connector.RequestChecker](c)
	require.True(t, ok)
	assert.Error(t, checker.CheckRequest(play.Request(t, connector.APICompletions, `{"prompt":[5],"n":2}`)),
		"the store child's engine would die")
	assert.Len(t, c.(interface {
		Unwrap() []connector.KVConnector
	}).Unwrap(), 2)

	c = open(t, `{"connectors":[{"type":"sharedstorage","config":{"cacheHitThreshold":0.5}}]}`)
	assert.Equal(t, connector.DecodeFirst, c.Traits().Order)
	cold, ok := connector.As[connector.ColdDetector](c)
	require.True(t, ok)
	assert.True(t, cold.Cold(nil, 200, []byte(`{"choices":[{"finish_reason":"cache_threshold"}]}`)))
	assert.True(t, c.Traits().Handoff.ContentStore)

	c = open(t, `{"connectors":[{"type":"sharedstorage"},{"type":"p2pnccl"}]}`)
	var fault *config.FieldError
	require.ErrorAs(t, check.Of(c).CheckEndpoint(discovery.Endpoint{Role: discovery.RolePrefill}), &fault)
	assert.Equal(t, "attributes.zmqAddress", fault.Path)
}

func TestTheFirstChildThatIsNoStoreDecidesTheOrder(t *testing.T) {
	for settings, want := range map[string]connector.Order{
		`{"connectors":[{"type":"sharedstorage","config":{"cacheHitThreshold":0.5}},` +
			`{"type":"nixl"}]}`: connector.PrefillThenDecode,
		`{"connectors":[{"type":"test-together"},` +
			`{"type":"test-flexible"}]}`: connector.Together,
		`{"connectors":[{"type":"test-flexible"},` +
			`{"type":"sharedstorage"}]}`: connector.PrefillThenDecode,
		`{"connectors":[{"type":"test-flexible"},` +
			`{"type":"test-together"}]}`: connector.Together,
	} {
		assert.Equal(t, want, open(t, settings).Traits().Order, settings)
	}
}

func TestWhatCannotWorkTogetherIsRefusedWhenMade(t *testing.T) {
	play.Refuses(t, multi.Name, map[string]string{
		`{}`:                                  "connectors … is empty",
		`{"connectors":[]}`:                   "connectors … is empty",
		`{"connectors":[{}]}`:                 "connectors[0].type … is missing",
		`{"connectors":[null]}`:               "connectors[0] … is null",
		`{"connectors":["nixl"]}`:             "connectors[0] … object",
		`{"connectors":[{"type":"nixel"}]}`:   "connectors[0].type … did you mean nixl?",
		`{"connectors":[{"type":"quantum"}]}`: "connectors[0].type … known are … sharedstorage",
		`{"connectors":[{"kv_connector":"NixelConnector"}]}`: "connectors[0].kv_connector … " +
			"did you mean NixlConnector?",
		`{"connectors":[{"kv_connector":""}]}`: "connectors[0].kv_connector … is empty",
		`{"connectors":[{"kv_connector":"NixlConnector","kv_rol":"kv_both"}]}`: "connectors[0].kv_rol … " +
			"did you mean kv_role",
		`{"connectors":[{"kv_connector":"NixlConnector","kv_role":"both"}]}`: "connectors[0].kv_role … kv_both",
		`{"connectors":[{"type":"nixl","retry":{}}]}`:                        "connectors[0].retry … unknown field",
		`{"connectors":[{"type":"nixl","config":{"leaseDuration":"0s"}}]}`: "connectors[0].config.leaseDuration … " +
			"above 0",
		`{"connectors":[{"type":"nixl","parameters":{"leaseDuration":"0s"}}]}`: "connectors[0].parameters" +
			".leaseDuration … above 0",
		`{"connectors":[{"type":"nixl","config":{},"parameters":{}}]}`: "connectors[0].parameters … keep one",
		`{"connectors":[{"type":"multi","config":{"connectors":[{"type":"nixl"}]}}]}`: "connectors[0].type … " +
			"inside another",
		`{"connectors":[{"kv_connector":"MultiConnector"}]}`: "connectors[0].kv_connector … inside another",
		`{"connectors":[{"type":"test-notified"},{"type":"test-notified2"}]}`: "connectors[1].type … " +
			"did you mean test-notified?",
		`{"connectors":[{"type":"http"}]}`: "connectors[0].type … no connector of an engine's … " +
			"NixlConnector",
		`{"connectors":[{"type":""},{"type":"nixl"}]}`: "connectors[0].type … is missing",
		`{"connectors":[{"type":"nixl"},{"kv_connector":"NixlConnector"}]}`: "connectors[1] … " +
			"needs a handoff in P's response, as connectors[0] (nixl) does … keep one",
		`{"connectors":[{"type":"nixl"},{"type":"test-together"}]}`: "connectors … " +
			"no order of the legs in common … prefill-then-decode … test-together) wants together",
		`{"connectors":[{"type":"test-together"},{"type":"test-together"}]}`: "connectors[1] … " +
			"parameters of test-together",
		`{"connectors":[{"type":"test-preparer"},{"type":"test-flexible"}]}`: "connectors[1] … side call",
		`{"connectors":[{"type":"test-keys-a"},{"type":"test-keys-b"}]}`: "connectors[1] … " +
			"sets kv_ticket, as connectors[0] (test-keys-a) does",
		`{"connectors":[{"type":"test-id-a"},{"type":"test-id-b"}]}`: "connectors[1] … X-Request-Id",
		`{"connectors":[` + strings.Repeat(`{"type":"sharedstorage"},`, 16) +
			`{"type":"sharedstorage"}]}`: "connectors[16] … too many",
	})
}

func TestAnEnginesOwnLeaseIsTheHandoffs(t *testing.T) {
	c := open(t, `{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_port":"5",`+
		`"kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":300,`+
		`"some_new_setting":true}},{"type":"sharedstorage"}]}`)
	assert.Equal(t, 300*time.Second, c.Traits().Handoff.Lease,
		"how long a handoff may be used follows the engine's lease")
}

// A child that needs nothing in the requests changes neither the legs nor the order. Its launch settings are those of
// the engine's configuration.
func TestChildrenThatNeedNothingOnTheWire(t *testing.T) {
	c := open(t, `{"connectors":[{"type":"nixl"},{"kv_connector":"OffloadingConnector","kv_role":"kv_both",`+
		`"kv_connector_extra_config":{"num_cpu_blocks":1000}},{"kv_connector":"HiSparseConnector"}]}`)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	alone := open(t, `{"connectors":[{"type":"nixl"}]}`)
	s := play.Session(t, connector.APICompletions, `{"prompt":"x","max_tokens":9}`)
	assert.Equal(t, play.Prefill(t, alone, s), play.Prefill(t, c, s))
	_, err := tryOpen(`{"connectors":[{"kv_connector":"HiSparsConnector"}]}`)
	require.ErrorContains(t, err, "did you mean HiSparseConnector?")
}

// part is a child with one trait, registered for these tests.
type part struct {
	traits connector.Traits
	fail   error
	log    *[]string
}

func (p *part) Traits() connector.Traits { return p.traits }
func (p *part) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}
func (p *part) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}
func (p *part) Start(context.Context) error {
	*p.log = append(*p.log, "start "+p.traits.Name)
	return p.fail
}
func (p *part) Close() error { *p.log = append(*p.log, "close "+p.traits.Name); return nil }
func (p *part) HealthCheck(context.Context) error {
	return p.fail
}

type preparing struct{ part }

func (*preparing) Prepare(context.Context, *connector.Session, connector.Caller) (any, error) {
	return nil, nil
}

var (
	events   []string
	failures = map[string]error{}
)

func init() {
	register := func(t connector.Traits) {
		connector.Register(t.Name, func(json.RawMessage) (connector.KVConnector, error) {
			p := part{traits: t}
			p.log, p.fail = &events, failures[p.traits.Name]
			if p.traits.Name == "test-preparer" || p.traits.Name == "test-flexible" {
				return &preparing{p}, nil
			}
			return &p, nil
		})
	}
	together := []connector.Order{connector.Together}
	register(connector.Traits{Name: "test-together", Order: connector.Together})
	register(connector.Traits{Name: "test-flexible", OtherOrders: together})
	register(connector.Traits{Name: "test-preparer", OtherOrders: together})
	register(connector.Traits{Name: "test-keys-a", Members: []string{"kv_ticket"}})
	register(connector.Traits{Name: "test-keys-b", Members: []string{"kv_other", "kv_ticket"}})
	register(connector.Traits{Name: "test-id-a", OwnRequestID: true})
	register(connector.Traits{Name: "test-id-b", OwnRequestID: true})
	register(connector.Traits{Name: "test-by-length", Ending: connector.Ending{EndsByLength: true}})
}

func TestEachChildIsStartedAndClosedOnce(t *testing.T) {
	run := func(settings string) (start, stop error) {
		events = nil
		c := open(t, settings)
		s, ok := connector.As[connector.Starter](c)
		require.True(t, ok)
		if start = s.Start(context.Background()); start != nil {
			return start, nil
		}
		closer, ok := connector.As[interface{ Close() error }](c)
		require.True(t, ok)
		return start, errors.Join(closer.Close(), closer.Close())
	}
	start, stop := run(`{"connectors":[{"type":"test-keys-a"},{"type":"sharedstorage"},{"type":"test-by-length"}]}`)
	require.NoError(t, errors.Join(start, stop))
	assert.Equal(t, []string{"start test-keys-a", "start test-by-length", "close test-keys-a", "close test-by-length"},
		events)

	failures["test-by-length"] = errors.New("in use")
	defer delete(failures, "test-by-length")
	start, stop = run(`{"connectors":[{"type":"test-keys-a"},{"type":"test-by-length"}]}`)
	require.ErrorContains(t, start, "in use")
	require.NoError(t, stop)
	assert.Equal(t, []string{"start test-keys-a", "start test-by-length", "close test-keys-a"}, events,
		"what was started is closed again")
	h, _ := connector.As[connector.HealthChecker](
		open(t, `{"connectors":[{"type":"sharedstorage"},{"type":"test-by-length"}]}`),
	)
	assert.ErrorContains(t, h.HealthCheck(context.Background()), "in use")
}

func TestAnEndByLengthSurvivesTheOtherChildren(t *testing.T) {
	for _, settings := range []string{`{"connectors":[{"type":"test-by-length"},{"type":"sharedstorage"}]}`,
		`{"connectors":[{"type":"sharedstorage"},{"type":"test-by-length"}]}`} {
		s := play.Session(t, connector.APICompletions, `{"prompt":"x","stop":"a","min_tokens":5}`)
		assert.Equal(t, `{"prompt":"x","min_tokens":1,"max_tokens":1,"stream":false}`,
			play.Prefill(t, open(t, settings), s).Body, settings)
	}
}

func TestTheAsksOfOneChildAreFoundThroughTheWhole(t *testing.T) {
	c := open(t, `{"connectors":[{"type":"sharedstorage"},{"type":"test-preparer"}]}`)
	_, ok := connector.As[connector.Preparer](c)
	assert.True(t, ok)
	_, ok = connector.As[connector.Preparer](open(t, nixlAndStore))
	assert.False(t, ok)
}

// patient is a child that waits. As a store it only waits for a time to pass.
type patient struct{ part }

func (p *patient) Expect(*connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	return func(context.Context) (connector.Event, error) {
			*p.log = append(*p.log, "wait "+p.traits.Name)
			return connector.Event{Body: []byte(p.traits.Name)}, p.fail
		}, func(err error) {
			*p.log = append(*p.log, "done "+p.traits.Name)
		}
}

func init() {
	for name, store := range map[string]bool{"test-settling": true, "test-notified": false} {
		connector.Register(name, func(json.RawMessage) (connector.KVConnector, error) {
			return &patient{
				part{traits: connector.Traits{Name: name, Handoff: connector.Handoff{ContentStore: store}},
					log: &events, fail: failures[name]},
			}, nil
		})
	}
}

func TestAllWaitsAreWaitedForAndTheNoticeIsTheEvent(t *testing.T) {
	s := play.Session(t, connector.APIChat, `{"messages":[]}`)
	e, ok := connector.As[connector.Expecter](open(t, nixlAndStore))
	require.True(t, ok)
	wait, done := e.Expect(s)
	assert.Nil(t, wait, "nobody waits")
	done(nil)

	events = nil
	e, _ = connector.As[connector.Expecter](
		open(t, `{"connectors":[{"type":"test-settling"},{"type":"test-notified"},{"type":"test-settling"}]}`),
	)
	wait, done = e.Expect(s)
	ev, err := wait(context.Background())
	require.NoError(t, err)
	assert.Equal(t, "test-notified", string(ev.Body))
	done(nil)
	assert.Equal(
		t, []string{"wait test-settling", "wait test-notified", "wait test-settling", "done test-settling",
			"done test-notified", "done test-settling"}, events,
	)

	failures["test-notified"] = errors.New("too late")
	defer delete(failures, "test-notified")
	e, _ = connector.As[connector.Expecter](open(t, `{"connectors":[{"type":"test-notified"}]}`))
	wait, _ = e.Expect(s)
	_, err = wait(context.Background())
	require.ErrorContains(t, err, "too late")
}

func TestOptionsByHand(t *testing.T) {
	_, err := multi.New(nil)
	require.ErrorContains(t, err, "empty")
}

// vllm-ascend's documentation has MooncakeConnectorV1 bring the KV and AscendStoreConnector keep prefixes beside it.
func TestAscendsStoreBesideItsTransfer(t *testing.T) {
	for _, class := range []string{"AscendStoreConnector", "MooncakeConnectorStoreV1"} {
		c := open(t, `{"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":"20001",`+
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":8}}},`+
			`{"kv_connector":"`+class+`","kv_role":"kv_producer",`+
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}`)
		assert.Equal(t, "kv_transfer_params", c.Traits().Handoff.Member)
		assert.True(t, c.Traits().Ending.EndsByLength)
	}
}

// A tier of an engine's own memory is a child only as the engine writes it.
func TestATierIsNamedAsTheEngineNamesIt(t *testing.T) {
	_, err := tryOpen(`{"connectors":[{"type":"HiSparseConnector"},{"type":"nixl"}]}`)
	require.ErrorContains(t, err, "write the child as the engine does: {kv_connector: HiSparseConnector")
}
