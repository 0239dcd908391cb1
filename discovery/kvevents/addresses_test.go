// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/discovery"
)

func TestWhereAnEntrySaysThatItsEnginePublishes(t *testing.T) {
	for name, c := range map[string]struct {
		attributes map[string]string
		want       []address
		bad        bool
	}{
		"nothing": {nil, nil, false},
		"off":     {map[string]string{"kvEvents": "off", "kvEventsReplay": "tcp://*:5657"}, nil, false},
		"the engine's own host": {map[string]string{"kvEvents": "tcp://*:5557", "kvEventsReplay": "tcp://0.0.0.0:5657"},
			[]address{{0, "127.0.0.1:5557", "127.0.0.1:5657", ""}}, false},
		"another host": {map[string]string{"kvEvents": "tcp://events.example:5557"},
			[]address{{0, "events.example:5557", "", ""}}, false},
		"IPv6": {map[string]string{"kvEvents": "tcp://[fd00::1]:5557"},
			[]address{{0, "[fd00::1]:5557", "", ""}}, false},
		"ranks are at ports above": {map[string]string{"kvEvents": "tcp://*:5557", "kvEventsReplay": "tcp://*:5657",
			"dpSize": "2"}, []address{{0, "127.0.0.1:5557", "127.0.0.1:5657", ""}, {1, "127.0.0.1:5558",
			"127.0.0.1:5658", ""}}, false},
		"the ranks of this pod": {map[string]string{"kvEvents": "tcp://*:5557", "dpSizeLocal": "1", "dpStartRank": "3"},
			[]address{{3, "127.0.0.1:5560", "", ""}}, false},
		"a list": {map[string]string{"kvEvents": "tcp://a:1, tcp://b:2", "kvEventsReplay": "tcp://a:3,tcp://b:4"},
			[]address{{0, "a:1", "a:3", ""}, {1, "b:2", "b:4", ""}}, false},
		"a socket that connects": {map[string]string{"kvEventsReplay": "tcp://*:5657"},
			[]address{{0, "", "127.0.0.1:5657", ""}}, false},
		"a load stream": {map[string]string{"kvEvents": "tcp://*:5557", "loadEvents": "tcp://*:5559", "dpSize": "2"},
			[]address{{0, "127.0.0.1:5557", "", "127.0.0.1:5559"}, {1, "127.0.0.1:5558", "", "127.0.0.1:5560"}}, false},
		"a load stream alone": {map[string]string{"loadEvents": "tcp://a:1,tcp://b:2"},
			[]address{{0, "", "", "a:1"}, {1, "", "", "b:2"}}, false},
		"a load stream without a port": {map[string]string{"loadEvents": "tcp://*"}, nil, true},
		"lists of two lengths": {map[string]string{"kvEvents": "tcp://a:1,tcp://b:2,tcp://c:1",
			"kvEventsReplay": "tcp://a:3,tcp://b:4"}, nil, true},
		"another transport": {map[string]string{"kvEvents": "ipc:///tmp/x"}, nil, true},
		"no port":           {map[string]string{"kvEvents": "tcp://*"}, nil, true},
		"port 0":            {map[string]string{"kvEvents": "tcp://*:0"}, nil, true},
		"a port too high":   {map[string]string{"kvEvents": "tcp://*:65535", "dpSize": "2"}, nil, true},
		"too many ranks":    {map[string]string{"kvEvents": "tcp://*:1", "dpSize": "5000"}, nil, true},
	} {
		e := endpoint(t, "p", c.attributes)
		got, err := ofAttributes(e)
		assert.Equal(t, c.want, got, name)
		assert.Equal(t, c.bad, err != nil, name)
		assert.Equal(t, err, CheckAttributes(e), name)
	}
	assert.Error(t, CheckAttributes(discovery.Endpoint{Attributes: map[string]string{"kvEvents": "tcp://*:1"}}),
		"a wildcard needs a host")
}

func TestWhereVLLMSaysThatItPublishes(t *testing.T) {
	const tail = `,"buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}`
	for name, c := range map[string]struct {
		body string
		want []address
		err  error
	}{
		"none":       {`{}`, nil, errNoEvents},
		"no JSON":    {`x`, nil, errNonsense},
		"not a rank": {`{"a":{"endpoint":"tcp://*:1"}}`, nil, errNonsense},
		"one": {`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",` +
			`"replay_endpoint":"tcp://*:5657"` + tail + `}`, []address{{0, "h:5557", "h:5657", ""}}, nil},
		"no replay": {`{"2":{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":null` + tail + `}`,
			[]address{{2, "h:5557", "", ""}}, nil},
		"its host is not believed": {`{"0":{"endpoint":"tcp://[::]:7","replay_endpoint":"tcp://evil.example:22"}}`,
			[]address{{0, "h:7", "h:22", ""}}, nil},
		"off":      {`{"0":{"enable_kv_cache_events":false,"endpoint":"tcp://*:5557"}}`, nil, errNoEvents},
		"null":     {`{"0":{"publisher":"null","endpoint":"tcp://*:5557"}}`, nil, errNoEvents},
		"another":  {`{"0":{"endpoint":"ipc://*"}}`, nil, errNonsense},
		"bad port": {`{"0":{"endpoint":"tcp://*:99999"}}`, nil, errNonsense},
		"many":     {`{"5000":{"endpoint":"tcp://*:1"}}`, nil, errNonsense},
		"a port that vLLM chose": {`{"0":{"endpoint":"tcp://10.0.0.9:41234","replay_endpoint":"tcp://10.0.0.9:4444"}}`,
			[]address{{0, "h:41234", "h:4444", ""}}, nil},
		"a socket that connects here": {`{"0":{"endpoint":"tcp://10.0.0.9:5999","replay_endpoint":"tcp://*:5657"}}`,
			[]address{{0, "", "h:5657", ""}}, nil},
	} {
		got, err := ofVLLM([]byte(c.body), "h", func(port string) bool { return port == "5999" })
		assert.Equal(t, c.want, got, name)
		assert.Equal(t, c.err, err, name)
	}
}

func TestWhereSGLangSaysThatItPublishes(t *testing.T) {
	for name, c := range map[string]struct {
		body string
		want []address
		err  error
	}{
		"none":    {`{"api_key":"secret"}`, nil, errNoEvents},
		"null":    {`{"kv_events":{"publisher":"null","endpoint_port_base":5557}}`, nil, errNoEvents},
		"no JSON": {`x`, nil, errNonsense},
		"two ranks": {`{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"",` +
			`"block_size":1,"dp_size":2}}`, []address{{0, "h:5557", "", ""}, {1, "h:5558", "", ""}}, nil},
		"a replay": {`{"kv_events":{"publisher":"zmq","endpoint_port_base":5557,"dp_size":1,` +
			`"replay_endpoint_port_base":5657}}`, []address{{0, "h:5557", "h:5657", ""}}, nil},
		"a load stream": {`{"kv_events":{"publisher":"zmq","endpoint_port_base":5557,"dp_size":2,` +
			`"load_endpoint_port_base":5559,"load_topic":"load"}}`,
			[]address{{0, "h:5557", "", "h:5559"}, {1, "h:5558", "", "h:5560"}}, nil},
		"a load stream at no port": {`{"kv_events":{"publisher":"zmq","endpoint_port_base":5557,"dp_size":2,` +
			`"load_endpoint_port_base":65535}}`, []address{{0, "h:5557", "", ""}, {1, "h:5558", "", ""}}, nil},
		"bad port": {`{"kv_events":{"publisher":"zmq","endpoint_port_base":65535,"dp_size":2}}`, nil, errNonsense},
		"many":     {`{"kv_events":{"publisher":"zmq","endpoint_port_base":1,"dp_size":5000}}`, nil, errTooManyRanks},
	} {
		got, err := ofSGLang([]byte(c.body), "h")
		assert.Equal(t, c.want, got, name)
		assert.Equal(t, c.err, err, name)
	}
}

// Whatever an engine responds: no panic, and addresses at its own host alone.
func FuzzResponses(f *testing.F) {
	f.Add([]byte(`{"0":{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://x:1"}}`))
	f.Add([]byte(`{"kv_events":{"publisher":"zmq","endpoint_port_base":5557,"dp_size":2}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		vllm, _ := ofVLLM(body, "h", func(string) bool { return false })
		sglang, _ := ofSGLang(body, "h")
		for _, a := range append(vllm, sglang...) {
			for _, at := range []string{a.events, a.replay, a.load} {
				assert.True(t, at == "" || at[:2] == "h:", at)
			}
		}
	})
}
