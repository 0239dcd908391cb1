// SPDX-License-Identifier: Apache-2.0

// Package registration is a discovery source for engines that announce themselves, by ZeroMQ or by HTTP.
//
// # ZeroMQ
//
// Some of vLLM's connectors announce their engine to a proxy. Rank 0 opens a DEALER socket to the proxy's ROUTER (extra
// configuration proxy_ip with proxy_port or proxy_ping_port) and sends one frame every 3 to 5 seconds, a msgpack map.
// The proxy never responds.
//
// P2pNcclConnector (vLLM 0.9.2 to 0.22, kv_connector/v1/p2p/p2p_nccl_engine.py):
//
//	{"type": "P", "http_address": "10.0.1.2:20001", "zmq_address": "10.0.1.2:21001"}
//
// MoRIIOConnector (vLLM from 2026 on, kv_connector/v1/moriio;
// examples/disaggregated/disaggregated_serving/moriio_toy_proxy_server.py):
//
//	{"type": "D", "http_address": "10.0.0.6:8200", "zmq_address": "host:10.0.0.6,handshake:6301,notify:61005",
//	 "dp_size": 1, "tp_size": 8, "transfer_mode": "READ"}
//
// and its first releases:
//
//	{"type": "register", "role": "D", "index": "1", "request_address": "http://10.0.0.6:8200/v1/completions",
//	 "handshake_port": 6301, "notify_port": 61005, "dp_size": 1, "tp_size": 8, "transfer_mode": "READ"}
//
// and sometimes {"type": "HELLO"}, which has no meaning. P is role prefill, D is decode. The endpoint's ID is the HTTP
// address. Members become the attributes that connectors p2pnccl and moriio read: zmqAddress, handshakePort,
// notifyPort, tpSize, dpSize. One more attribute, mode ("read" or "write"), is for rules of picking; connectors do not
// read it. Unknown members are ignored. Numbers may be text. IPv6 addresses may come with brackets or without, since
// engines join them with a port by a colon.
//
// An engine that changes its role has the new one from its next message on. An engine that comes back with another HTTP
// address is recognized by its zmq_address, and the old address leaves at once. An engine that is silent for
// [Options.Expiry] leaves; see below for how.
//
// This socket has no authentication, so it belongs into a network with engines only: whoever reaches it can have
// prompts sent to himself. But the connection that announced an engine owns it, as long as the connection lives and
// announces the engine again. Messages of other connections about this engine, or about another engine with its
// zmq_address, are held: they change nothing, and only keep the engine on the list if they say the same. So no engine
// can turn another away.
//
// All input is bounded: 4 KiB per frame, 256 messages a second and 64 engines at once per connection, 4096 connections.
// Input that is not ZMTP, or no known message, is counted (see [Counts]) and has no other effect.
//
// # HTTP
//
// Other engines and programs use a small HTTP API. Bodies and responses are JSON.
//
//	POST   /v1/endpoints                  register: {"id", "url", "role", "group", "zone", "model", "version",
//	                                      "attributes", "leaseSeconds"}; url and role are needed.
//	                                      201, or 200 if it was known: {"id": "…", "leaseSeconds": 15}
//	PUT    /v1/endpoints/{id}/heartbeat   renew the lease; 200 with the same object, or 404: register again
//	POST   /v1/endpoints/{id}/drain       get no new requests, before the engine ends; 200.
//	                                      Heartbeats go on; registering again ends the drain
//	DELETE /v1/endpoints/{id}             leave; 204
//	GET    /v1/endpoints                  all engines, those announced by ZeroMQ too:
//	                                      {"endpoints": [{"id", "url", "role", "phase", …}]}
//
// If a registration gives no id, the id is the URL's host and port (and path). In paths it is percent-encoded.
// Registering an id again replaces what it said, with role and URL. A URL that is registered under another id is a
// conflict, 409, unless that other one is draining. ZeroMQ messages do not change what is registered by HTTP. HTTP
// takes over what came by ZeroMQ, under the new id. For an engine known only by ZeroMQ, drain works, and lasts until
// the engine leaves; a heartbeat is 404, and DELETE is 409.
//
// Whoever may register may also drain and delete what others have registered. So operators can use the API, too.
//
// With [Options.Token] or [Options.TokenFile] each request needs Authorization: Bearer TOKEN. ZeroMQ has no token.
// Requests of browsers from other sites are
// refused. Errors are
//
//	{"error": {"message": "url: has no port", "type": "invalid_request_error", "param": "url",
//	 "code": "invalid_request"}}
//
// with the codes invalid_request (400), unauthorized (401), forbidden (403), not_found (404), method_not_allowed (405),
// conflict (409), body_too_large (413) and too_many_endpoints (503).
//
// # Leaving
//
// When an engine's lease or expiry has run out, or it was deleted, it is published as draining for a second before it
// leaves the list. An engine that was drained before leaves at once.
package registration
