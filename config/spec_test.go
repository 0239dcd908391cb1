// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
)

func TestSpecOfTheDesignDocuments(t *testing.T) {
	spec, err := config.ParseSpec(json.RawMessage(`{
		"type": "lmcache",
		"config": {"redisConfig": {"port": 6379, "password": "secret"}},
		"resources": {"maxMemory": "8Gi"},
		"timeouts": {"prefill": "45s", "decode": "180s", "idle": 0},
		"retry": {"maxAttempts": 3, "backoffBase": "1s", "backoffMax": "10s"}
	}`))
	require.NoError(t, err)
	assert.Equal(t, "lmcache", spec.Type)
	assert.JSONEq(t, `{"redisConfig": {"port": 6379, "password": "secret"}}`, string(spec.Config))
	limits := spec.Timeouts.Resolve(0)
	assert.Equal(t, 45*time.Second, limits.Prefill)
	assert.Equal(t, 180*time.Second, limits.Decode)
	assert.Equal(t, config.None, limits.Idle, "0 means none, and is not the default")
	assert.Equal(t, config.Retry{MaxAttempts: 3, BackoffBase: time.Second, BackoffMax: 10 * time.Second, Budget: 0.2},
		spec.Retry.Resolve())
	n, err := spec.Resources.MaxMemory.Bytes()
	require.NoError(t, err)
	assert.EqualValues(t, 8<<30, n)
}

func TestSpecDefaults(t *testing.T) {
	for _, raw := range []string{"", "  ", "null", "{}",
		`{"timeouts":null,"retry":{"maxAttempts":null},"config":null}`} {
		spec, err := config.ParseSpec(json.RawMessage(raw))
		require.NoError(t, err, raw)
		assert.Equal(t, config.Timeouts{
			Connect: 2 * time.Second, Prefill: time.Minute, Handoff: 25 * time.Second, Transfer: config.None,
			Decode: 10 * time.Minute,
			Idle:   time.Minute, Silence: 10 * time.Minute, Cleanup: 5 * time.Second, HealthCheck: 2 * time.Second,
			Body:  time.Minute,
			Write: 30 * time.Second, Steps: 15 * time.Minute,
		}, spec.Timeouts.Resolve(30*time.Second))
		assert.Equal(t, config.Retry{MaxAttempts: 2, BackoffBase: 50 * time.Millisecond, BackoffMax: 2 * time.Second,
			Budget: 0.2}, spec.Retry.Resolve())
		assert.Nil(t, spec.Config)
	}
}

func TestHandoffDefaultFollowsTheLease(t *testing.T) {
	for lease, want := range map[time.Duration]time.Duration{0: config.None, -time.Second: config.None,
		4 * time.Second: 2 * time.Second, 5 * time.Second: 2500 * time.Millisecond, 12 * time.Second: 7 * time.Second,
		time.Minute: 55 * time.Second} {
		assert.Equal(t, want, config.Timeouts{}.Resolve(lease).Handoff, "lease %v", lease)
	}
	assert.Equal(t, config.None, config.Timeouts{Handoff: config.None}.Resolve(time.Minute).Handoff)
}

func TestBackoffMaxIsNeverBelowAGivenBase(t *testing.T) {
	assert.Equal(t, 3*time.Second, config.Retry{BackoffBase: 3 * time.Second}.Resolve().BackoffMax)
}

func TestParametersIsTheOtherWordForConfig(t *testing.T) {
	spec, err := config.ParseSpec(json.RawMessage(`{"parameters": {"a": 1}}`))
	require.NoError(t, err)
	assert.JSONEq(t, `{"a": 1}`, string(spec.Config))
}

func TestSpecFaults(t *testing.T) {
	for name, c := range map[string]struct {
		raw  string
		want []string
	}{
		"unknown member": {`{"tpye":"nixl"}`, []string{`tpye: unknown field; did you mean type?`}},
		"unknown in timeouts": {`{"timeouts":{"prefil":"1s"}}`,
			[]string{`timeouts.prefil: unknown field; did you mean prefill?`}},
		"case counts": {`{"Type":"nixl"}`, []string{`Type: unknown field; did you mean type?`}},
		"number as duration": {`{"timeouts":{"decode":30}}`,
			[]string{`timeouts.decode: is a number without a unit; write a number and a unit, like "30s" or "1m30s"`}},
		"duration unreadable": {`{"timeouts":{"decode":"30"}}`,
			[]string{`timeouts.decode: is not a duration; write a number and a unit, like "30s" or "1m30s"`}},
		"duration negative": {`{"timeouts":{"idle":"-1s"}}`,
			[]string{`timeouts.idle: is negative; write a positive duration, or "0s"`}},
		"duration a list": {`{"timeouts":{"idle":[]}}`,
			[]string{`timeouts.idle: is a list, not a duration; write a number and a unit, like "30s" or "1m30s"`}},
		"attempts 0": {`{"retry":{"maxAttempts":0}}`,
			[]string{`retry.maxAttempts: is less than 1; write 1 for a single attempt`}},
		"attempts a fraction": {`{"retry":{"maxAttempts":1.5}}`,
			[]string{`retry.maxAttempts: is not a whole number; write a whole number`}},
		"backoff upside down": {`{"retry":{"backoffBase":"3s","backoffMax":"1s"}}`,
			[]string{`retry.backoffBase: is longer than backoffMax; write a backoffMax of at least backoffBase`}},
		"budget 0": {`{"retry":{"budget":0}}`,
			[]string{`retry.budget: is not positive; write maxAttempts: 1 for no retries`}},
		"budget a string": {`{"retry":{"budget":"20%"}}`,
			[]string{`retry.budget: is a string, not a number; write it without quotes`}},
		"quantity unreadable": {`{"resources":{"maxDisk":"8GB"}}`,
			[]string{`resources.maxDisk: is not a quantity; write a Kubernetes quantity, like "8Gi" or "500M"`}},
		"config a string": {`{"config":"secret"}`,
			[]string{`config: is a string, not an object; write its members by name`}},
		"config and parameter": {`{"config":{},"parameters":{}}`,
			[]string{`parameters: is given besides config, which means the same; keep one of the two`}},
		"fallback misspelt": {`{"fallback":"decod"}`,
			[]string{`fallback: is not a known value; did you mean decode?`}},
		"fallback unknown": {`{"fallback":"whatever"}`,
			[]string{`fallback: is not a known value; known are error, decode, connector`}},
		"fallback to nothing": {`{"fallback":"connector"}`,
			[]string{`fallbackConnector: is missing; write the connector to fall back to: {type: NAME}`}},
		"fallback without use": {`{"fallbackConnector":{}}`,
			[]string{`fallbackConnector: is given, but fallback is not connector; write fallback: connector, or ` +
				`remove fallbackConnector`}},
		"unsupported": {`{"unsupported":"refused"}`,
			[]string{`unsupported: is not a known value; did you mean refuse?`}},
		"inside a fallback": {`{"fallback":"connector","fallbackConnector":{"retry":{"maxAttempts":0},"x":1}}`,
			[]string{`fallbackConnector.x: unknown field; known are config, fallback, fallbackConnector, parameters, ` +
				`resources, retry, timeouts, type, unsupported`,
				`fallbackConnector.retry.maxAttempts: is less than 1; write 1 for a single attempt`}},
		"several at once": {`{"typ":"x","timeouts":{"idle":1},"retry":{"maxAttempts":-1}}`, []string{
			`typ: unknown field; did you mean type?`,
			`timeouts.idle: is a number without a unit; write a number and a unit, like "30s" or "1m30s"`,
			`retry.maxAttempts: is less than 1; write 1 for a single attempt`}},
		"given twice": {`{"type":"a","type":"b"}`, []string{`type: is given twice; keep one of the two`}},
		"a list":      {`[]`, []string{`is a list, not an object; write its members by name`}},
		"not JSON":    {`{`, []string{`is not JSON; write one JSON object`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.ParseSpec(json.RawMessage(c.raw))
			require.Error(t, err)
			if name == "fallback to nothing" || name == "fallback without use" {
				assert.Equal(t, c.want, lines(err)[:1])
				return
			}
			assert.ElementsMatch(t, c.want, lines(err))
		})
	}
}

func TestSpecSurvivesItsOwnJSON(t *testing.T) {
	in := `{"type":"nixl","config":{"leaseDuration":"30s"},"timeouts":{"prefill":"1m0s","idle":"0s"},` +
		`"retry":{"maxAttempts":1,"budget":0.5,"timeoutFinal":true,"hedge":"3s"},` +
		`"resources":{"maxMemory":"8Gi"},"fallback":"connector","fallbackConnector":{"type":"http"},` +
		`"unsupported":"refuse"}`
	spec, err := config.ParseSpec(json.RawMessage(in))
	require.NoError(t, err)
	out, err := json.Marshal(spec)
	require.NoError(t, err)
	assert.JSONEq(t, in, string(out))
}
