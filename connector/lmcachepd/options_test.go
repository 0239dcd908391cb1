// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/lmcachepd"
)

func TestBadValuesAreRefusedAtTheirPath(t *testing.T) {
	play.Refuses(t, lmcachepd.Name, map[string]string{
		`{"notifyListen":"8500"}`:                     "notifyListen",
		`{"notifyListen":"h:port"}`:                   "notifyListen",
		`{"notifyListen":"h:65536"}`:                  "notifyListen",
		`{"notifyTimeout":"0s"}`:                      "notifyTimeout",
		`{"notifyTimeout":10}`:                        "notifyTimeout",
		`{"notifications":-1}`:                        "notifications",
		`{"notifications":5000}`:                      "notifications",
		`{"retFirstTok":"yes"}`:                       "retFirstTok",
		`{"retFirstToken":true}`:                      "retFirstToken",
		`{"enable_pd":false}`:                         "enable_pd",
		`{"lmcache.enable_nixl":"False"}`:             "lmcache.enable_nixl",
		`{"lmcache.pd_skip_proxy_notification":true}`: "lmcache.pd_skip_proxy_notification",
		`{"nixl_role":"prefiller"}`:                   "nixl_role",
		`{"pd_backend_mode":"fast"}`:                  "pd_backend_mode",
		`{"enable_p2p":true}`:                         "enable_p2p",
		`{"nixl_peer_port":0}`:                        "nixl_peer_port",
		`{"pd_proxy_port":70000}`:                     "pd_proxy_port",
		`{"pd_peer_init_port":"a"}`:                   "pd_peer_init_port",
		`{"pd_buffer_size":1,"nixl_buffer_size":2}`:   "pd_buffer_size",
		`{"enable_pd":true,"lmcache.enable_pd":true}`: "lmcache.enable_pd",
		`{"lmcache.pd_proxy_hots":"h"}`:               "lmcache.pd_proxy_hots",
	})
}

// These are all settings that Kthena's issue 1069 tried, but without the switch that keeps P from sending notices.
func TestTheSettingsOfIssue1069(t *testing.T) {
	play.Open(t, lmcachepd.Name, `{"lmcache.enable_pd":true,"lmcache.pd_role":"sender",
		"lmcache.transfer_channel":"nixl","lmcache.nixl_backends":["UCX"],"lmcache.pd_peer_host":"h",
		"lmcache.pd_peer_init_port":"10086","lmcache.pd_peer_alloc_port":"10087","lmcache.pd_buffer_device":"cuda"}`)
}

// The launch guide's file is used as it is. Its receiver has one port, of which two are made; today's names come in
// pairs.
func TestOnePortOf2025BecomesTwo(t *testing.T) {
	d := decodeEngine(t, nil)
	c := play.Open(t, lmcachepd.Name, `{"enable_nixl":true,"nixl_role":"receiver","nixl_peer_host":"localhost",`+
		`"nixl_peer_port":55555,"nixl_buffer_size":1073741824}`)
	require.NoError(t, check.Of(c).CheckEndpoint(d), "requests are sent there")
	play.Refuses(t, lmcachepd.Name, map[string]string{
		`{"enable_nixl":true,"nixl_peer_port":65500}`: "pd_peer_alloc_port",
	})
	c = play.Open(t, lmcachepd.Name, `{"enable_pd":true,"pd_peer_init_port":7300}`)
	require.ErrorContains(t, check.Of(c).CheckEndpoint(d), "receiverAllocPorts", "today's names come in pairs")
}
