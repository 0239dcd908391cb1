// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"strconv"
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// lmcacheStore gives both engines one store, or each its own.
func lmcacheStore(shared bool) func(*testing.T, *protocol) {
	return func(t *testing.T, c *protocol) {
		dir := t.TempDir()
		for _, side := range []*enginesim.Config{&c.prefill, &c.decode} {
			side.KVRole = enginesim.RoleBoth
			side.Extra = map[string]string{"store": dir, "hash_seed": "0"}
			if !shared {
				side.Extra["store"] = t.TempDir()
			}
		}
	}
}

// change gives D a setting of its own.
func change(name, value string) func(*testing.T, *protocol) {
	return func(_ *testing.T, c *protocol) {
		extra := maps.Clone(c.decode.Extra)
		extra[name] = value
		c.decode.Extra = extra
	}
}

// notices puts the gateway's listener at a free port, and lets P tell it.
func notices(extra map[string]string, config string) func(*testing.T, *protocol) {
	return func(t *testing.T, c *protocol) {
		port := unusedPort(t)
		c.config = `{notifyListen: "127.0.0.1:` + port + `", notifyTimeout: 20s` + config + `}`
		settings := map[string]string{"pd_proxy_host": "127.0.0.1", "pd_proxy_port": port, "hash_seed": "0"}
		maps.Copy(settings, extra)
		c.prefill.Extra, c.decode.Extra = settings, settings
	}
}

func receivers(_, d *enginesim.Engine) (prefill, decode attributes) {
	host, init, alloc := d.Receiver()
	return nil, attributes{"receiverHost": host, "receiverInitPorts": strconv.Itoa(init),
		"receiverAllocPorts": strconv.Itoa(alloc)}
}

func lmcacheProtocols() (rows []protocol) {
	pd := func(name, extraConfig string, extra map[string]string, apis []connector.API) protocol {
		return protocol{
			connector: "lmcache-pd", name: name, apis: apis, prepare: notices(extra, extraConfig),
			attributes: receivers,
		}
	}
	plain := pd("", "", nil, vllmAPIs)
	plain.broken = map[string]broken{
		"hash seeds that differ": {change("hash_seed", "1"), reuse.NotReused, "PYTHONHASHSEED"},
		"notices switched off": {func(_ *testing.T, c *protocol) {
			c.prefill.Extra = maps.Clone(c.prefill.Extra)
			c.prefill.Extra["pd_skip_proxy_notification"] = "true"
			c.config = strings.Replace(c.config, "20s", "2s", 1)
		}, reuse.Failed, "pd_skip_proxy_notification"},
		"a receiver without room": {func(t *testing.T, c *protocol) {
			change("pd_buffer_size", "16")(t, c)
			c.config = strings.Replace(c.config, "20s", "2s", 1)
		}, reuse.Failed, "notice"},
	}
	rows = append(rows,
		// Kthena's issue 1069: the engines' responses are the same with and without a store in common.
		protocol{
			connector: "lmcache", apis: vllmAPIs, prepare: lmcacheStore(true),
			broken: map[string]broken{
				"stores that are not shared": {func(t *testing.T, c *protocol) { lmcacheStore(false)(t, c) },
					reuse.NotReused, "store"},
				"hash seeds that differ": {change("hash_seed", "1"), reuse.NotReused, "PYTHONHASHSEED"},
				"chunks of another size": {change("chunk_size", "128"), reuse.NotReused, "store"},
				"engines in PD mode": {func(t *testing.T, c *protocol) {
					c.prefill.Listen = "127.0.0.1:" + unusedPort(t) // P ends at the first request
					c.prefill.Connector, c.prefill.KVRole, c.prefill.Extra = "lmcache-pd", enginesim.RoleProducer,
						map[string]string{"pd_skip_proxy_notification": "true", "hash_seed": "0"}
					c.decode.Connector, c.decode.KVRole, c.decode.Extra = "lmcache-pd", enginesim.RoleConsumer,
						map[string]string{"hash_seed": "0"}
				}, reuse.Failed, "lmcache-pd"},
			},
		},
		// The store's put is asynchronous: D finds what is there when it looks.
		protocol{
			connector: "lmcache", name: "a store that takes its time", config: "{settleTime: 2s}",
			prepare: func(t *testing.T, c *protocol) {
				lmcacheStore(true)(t, c)
				c.prefill.Extra["put_delay"] = "50ms"
			},
			broken: map[string]broken{
				"nothing is waited for": {func(_ *testing.T, c *protocol) {
					c.config = "{}"
					c.prefill.Extra["put_delay"] = "10s"
				}, reuse.NotReused, "settleTime"},
			},
		},
		plain,
		pd("first token from P", ", retFirstTok: true", map[string]string{"skip_last_n_tokens": "1"}, nil),
	)
	return rows
}
