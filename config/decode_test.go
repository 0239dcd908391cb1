// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

type base struct {
	Name string `json:"name"`
}

type settings struct {
	base
	Port      uint16                     `json:"port"`
	Count     int8                       `json:"count"`
	Ratio     float64                    `json:"ratio"`
	On        bool                       `json:"on"`
	Lease     config.Duration            `json:"lease"`
	Wait      *config.Duration           `json:"wait"`
	Size      config.Quantity            `json:"size"`
	Role      discovery.Role             `json:"role"`
	Nested    struct{ Depth int }        `json:"nested"`
	RDMA      *struct{ Device string }   `json:"rdmaConfig"`
	Hosts     []string                   `json:"hosts"`
	Children  []base                     `json:"children"`
	Labels    map[string]string          `json:"labels"`
	Extra     map[string]json.RawMessage `json:"extra"`
	Raw       json.RawMessage            `json:"raw"`
	Any       any                        `json:"any"`
	Connector config.Spec                `json:"connector"`
	Ignored   string                     `json:"-"`
	hidden    string
}

func TestDecodeReadsEveryKind(t *testing.T) {
	s := settings{base: base{Name: "default"}, Count: 7, Ignored: "kept"}
	require.NoError(t, config.Decode(json.RawMessage(`{
		"port": 1e3, "count": null, "ratio": 0.5, "on": true, "lease": "30s", "wait": "1s",
		"size": "8Gi", "role": "both",
		"nested": {"Depth": -3}, "rdmaConfig": {"Device": "mlx5"}, "hosts": ["a", "b"], "children": [{"name": "c"}],
		"labels": {"app.kubernetes.io/name": "x", "gone": null}, "extra": {"k": [1]}, "raw": {"deep": {"a": 1}},
		"any": {"l": [1, "x", null, {"y": true}]}, "connector": {"type": "nixl"}}`), &s))
	wait := config.Duration(time.Second)
	assert.Equal(t, "default", s.Name, "what is absent keeps its default")
	assert.EqualValues(t, 7, s.Count, "null is absent")
	assert.EqualValues(t, 1000, s.Port)
	assert.InDelta(t, 0.5, s.Ratio, 0)
	assert.True(t, s.On)
	assert.Equal(t, config.Duration(30*time.Second), s.Lease)
	assert.Equal(t, &wait, s.Wait)
	assert.Equal(t, config.Quantity("8Gi"), s.Size)
	assert.Equal(t, discovery.RoleBoth, s.Role)
	assert.Equal(t, -3, s.Nested.Depth)
	assert.Equal(t, "mlx5", s.RDMA.Device)
	assert.Equal(t, []string{"a", "b"}, s.Hosts)
	assert.Equal(t, []base{{Name: "c"}}, s.Children)
	assert.Equal(t, map[string]string{"app.kubernetes.io/name": "x"}, s.Labels)
	assert.JSONEq(t, `[1]`, string(s.Extra["k"]))
	assert.JSONEq(t, `{"deep": {"a": 1}}`, string(s.Raw))
	assert.Equal(t, "nixl", s.Connector.Type)
	assert.Equal(t, "kept", s.Ignored)
	assert.Empty(t, s.hidden)
}

func TestDecodeFaults(t *testing.T) {
	for raw, want := range map[string]string{
		`{"prot":1}`:                    `prot: unknown field; did you mean port?`,
		`{"rdmaConfig":{"device":"x"}}`: `rdmaConfig.device: unknown field; did you mean Device?`,
		`{"hidden":"x"}`:                `hidden: unknown field; known are`,
		`{"Ignored":"x"}`:               `Ignored: unknown field; known are`,
		`{"port":"8000"}`:               `port: is a string, not a whole number; write it without quotes`,
		`{"port":70000}`:                `port: is out of range; write a whole number of at most 16 bits`,
		`{"port":-1}`:                   `port: is negative; write a whole number from 0 on`,
		`{"count":128}`:                 `count: is out of range; write a whole number of at most 7 bits`,
		`{"count":1e999999999}`:         `count: is out of range; write a whole number`,
		`{"ratio":"1"}`:                 `ratio: is a string, not a number; write it without quotes`,
		`{"on":"yes"}`:                  `on: is a string, not a boolean; write true or false`,
		`{"on":1}`:                      `on: is a number, not a boolean; write true or false`,
		`{"name":8}`:                    `name: is a number, not a string; put it in quotes`,
		`{"name":{}}`:                   `name: is an object, not a string; write a string`,
		`{"lease":30}`: `lease: is a number without a unit; write a number and a unit, like ` +
			`"30s" or "1m30s"`,
		`{"role":"prefil"}`:                  `role: role "prefil" is not one of prefill, decode, both, encode`,
		`{"role":1}`:                         `role: is a number, not a string; put it in quotes`,
		`{"nested":[]}`:                      `nested: is a list, not an object; write its members by name`,
		`{"hosts":"a"}`:                      `hosts: is a string, not a list; put it in [ ]`,
		`{"hosts":["a",1]}`:                  `hosts[1]: is a number, not a string; put it in quotes`,
		`{"hosts":[null]}`:                   `hosts[0]: is null; remove it`,
		`{"children":[{},{"nam":1}]}`:        `children[1].nam: unknown field; did you mean name?`,
		`{"labels":{"a.b/c":1}}`:             `labels["a.b/c"]: is a number, not a string; put it in quotes`,
		`{"labels":{"a":"1","a":"2"}}`:       `labels.a: is given twice; keep one of the two`,
		`{"any":{"x":[{"a":1,"a":2}]}}`:      `any.x[0].a: is given twice; keep one of the two`,
		`{"connector":{"timeouts":{"x":1}}}`: `connector.timeouts.x: unknown field; known are`,
	} {
		err := config.Decode(json.RawMessage(raw), &settings{})
		require.Error(t, err, raw)
		require.Len(t, lines(err), 1, raw)
		if strings.HasSuffix(want, "known are") {
			assert.True(t, strings.HasPrefix(lines(err)[0], want), "%s: %s", raw, lines(err)[0])
		} else {
			assert.Equal(t, want, lines(err)[0], raw)
		}
	}
}

func TestDecodeNeverShowsValues(t *testing.T) {
	for _, member := range []string{"port", "count", "ratio", "on", "lease", "wait", "size", "nested", "rdmaConfig",
		"hosts", "children", "labels", "connector"} {
		for _, value := range []string{`"hunter2"`, `["hunter2"]`,
			`{"type":"x","timeouts":"hunter2","Depth":"hunter2","l":["hunter2"]}`} {
			err := config.Decode(json.RawMessage(`{"`+member+`":`+value+`}`), &settings{})
			if err != nil {
				assert.NotContains(t, err.Error(), "hunter2", member)
			}
		}
	}
}

func TestDecodeBoundsItsWork(t *testing.T) {
	deep := `{"any":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + `}`
	require.ErrorContains(t, config.Decode(json.RawMessage(deep), &settings{}), "nested too deeply")
	require.NoError(t, config.Decode(json.RawMessage(`{"name":"`+strings.Repeat("[", 500)+`\"[["}`), &settings{}))
	long := strings.Repeat("x", 1<<20)
	err := config.Decode(json.RawMessage(`{"`+long+`":1}`), &settings{})
	require.Error(t, err)
	assert.Less(t, len(err.Error()), 400)
}

func TestDecodeDoesNotWriteThroughASharedDefault(t *testing.T) {
	shared := config.Duration(time.Second)
	s := settings{Wait: &shared}
	require.NoError(t, config.Decode(json.RawMessage(`{"wait":"2s"}`), &s))
	assert.Equal(t, config.Duration(time.Second), shared)
	assert.Equal(t, config.Duration(2*time.Second), *s.Wait)
}

func TestDecodeNeedsAStruct(t *testing.T) {
	require.Error(t, config.Decode(nil, settings{}))
	require.Error(t, config.Decode(nil, new(int)))
	require.Error(t, config.Decode(nil, (*settings)(nil)))
}

func TestFieldErrorsWalksJoinedAndWrappedErrors(t *testing.T) {
	a, b := &config.FieldError{Path: "a", Problem: "p"}, &config.FieldError{Path: "b", Problem: "p", Remedy: "r"}
	err := fmt.Errorf("nixl: %w", errors.Join(a, fmt.Errorf("more: %w", b), errors.New("plain")))
	assert.Equal(t, []string{"a: p", "b: p; r", "plain"}, lines(err))
	assert.Empty(t, config.FieldErrors(nil))
	assert.Equal(t, []string{"config.a: p", "config: p", "config[0].b: p"}, []string{
		a.In("config").Error(), (&config.FieldError{Problem: "p"}).In("config").Error(),
		(&config.FieldError{Path: "[0].b", Problem: "p"}).In("config").Error()})
}

func TestNearest(t *testing.T) {
	known := []string{"listen", "admin", "maxBodyBytes", "drainTimeout"}
	for name, want := range map[string]string{"lisen": "listen", "Listen": "listen", "amdin": "admin",
		"maxBodybytes": "maxBodyBytes", "drain": "", "xyz": "", "": "", strings.Repeat("a", 1<<16): ""} {
		assert.Equal(t, want, config.Nearest(name, known), name)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"port":1,"connector":{"fallback":"decode"},"any":[{"a":1}]}`))
	f.Add([]byte(`{"size":"1e9","lease":"1h","hosts":[null],"\ud800":1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var s settings
		if err := config.Decode(raw, &s); err == nil && len(raw) > 0 && json.Valid(raw) {
			_, err = json.Marshal(s.Connector)
			require.NoError(t, err, "what was accepted can be written")
		}
	})
}

func lines(err error) []string {
	var out []string
	for _, fe := range config.FieldErrors(err) {
		out = append(out, fe.Error())
	}
	return out
}
