// SPDX-License-Identifier: Apache-2.0

// Package registration is a discovery source of engines that announce themselves, by ZeroMQ or by HTTP.
//
// # ZeroMQ
//
// Some of vLLM's connectors tell a proxy of their engine: rank 0 opens a DEALER socket to the proxy's ROUTER (extra
// configuration proxy_ip with proxy_port or proxy_ping_port) and sends one frame every 3 to 5 seconds, a msgpack map.
// Nothing is ever answered.
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
// and, now and then, {"type": "HELLO"}, which says nothing. P is role prefill, D is decode. The endpoint's ID is the
// HTTP address. Members become the attributes that connectors p2pnccl and moriio read: zmqAddress, handshakePort,
// notifyPort, tpSize, dpSize; and mode, "read" or "write", which is for rules of picking: connectors do not read it.
// Unknown members are passed over; numbers may be text. IPv6 addresses may come with brackets or without, since engines
// join them with a port by a colon.
//
// An engine that changes its role has the new one with its next message. One that comes back with another HTTP address
// is known by its zmq_address: the old address leaves at once. An engine that is not heard for [Options.Expiry] leaves;
// see below for how.
//
// Nobody is asked for a name at this door, so it belongs into a network of engines alone: whoever reaches it can be
// sent prompts. But an engine is spoken for by the connection that announced it, as long as it lives and is heard: what
// another one says of that engine, or of another with its zmq_address, is held, and only keeps it on the list if it is
// the same. So no engine turns another away.
//
// Whatever comes in is bounded: 4 KiB a frame, 256 messages a second and 64 engines at once for one connection, 4096
// connections. What is not ZMTP, or no such message, is counted, see [Counts], and harms nobody else.
//
// # HTTP
//
// For anything else there is a small API. Bodies and answers are JSON.
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
// An id is the URL's host and port (and path) where none is given; in paths it is percent-encoded. Registering an id
// anew replaces what it said, role and URL included. A URL that is registered under another id is a conflict, 409,
// unless that one is draining. What is registered by HTTP is not changed by ZeroMQ; what came by ZeroMQ is taken over
// by HTTP, under the new id. Of an engine that only ZeroMQ tells of, drain is known, and lasts until it goes;
// heartbeats are not (404), and DELETE is a conflict.
//
// Whoever may register may also drain and delete what others have registered: it is an interface for operators, too.
//
// With [Options.Token] each request needs Authorization: Bearer TOKEN. Browsers' requests from other sites are refused.
// Errors are
//
//	{"error": {"message": "url: has no port", "type": "invalid_request_error", "param": "url",
//	 "code": "invalid_request"}}
//
// with the codes invalid_request (400), unauthorized (401), forbidden (403), not_found (404), method_not_allowed (405),
// conflict (409), body_too_large (413) and too_many_endpoints (503).
//
// # Leaving
//
// An engine whose lease or expiry ran out, or that was deleted, is published as draining for a second before it leaves
// the list; one that was drained before leaves at once.
package registration
