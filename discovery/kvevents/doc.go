// SPDX-License-Identifier: Apache-2.0

// Package kvevents subscribes to the KV-cache events of engines and gives them to a [Sink], such as an index of which
// engine holds which prompt's blocks.
//
//	set := discovery.NewSet(source)
//	sub, err := kvevents.New(sink, &kvevents.Options{Client: http.DefaultTransport})
//	go sub.Run(ctx, set)
//
// Each data-parallel rank of an engine has a stream of its own (vLLM 0.32.0, distributed/kv_events.py; SGLang 0.5.23,
// disaggregation/kv_events.py): a ZeroMQ PUB socket sends three frames a batch, a topic, a sequence number that begins
// with 0 when the engine starts (8 bytes, big endian), and msgpack. A ROUTER sends past batches again, from a number
// on. The package reads the frames, connects again after a loss, and asks for replays; the sink reads the batches, and
// says when a replay is needed.
//
// Where an engine publishes is known from one of these, in this order:
//
//   - The attribute kvEvents of its entry, "tcp://HOST:PORT" of rank 0, or one address for each rank, separated by
//     commas. A host of * is the engine's own. Rank n is n ports above (attributes dpSize, or dpSizeLocal and
//     dpStartRank). The attribute kvEventsReplay is the ROUTER's address in the same form; alone it is that
//     of an engine which does not say it, or whose PUB socket connects. "off" as kvEvents subscribes to nothing.
//     An address http://HOST:PORT/kv_cache_events is another way, that of TensorRT-LLM: the engine keeps its events
//     until a POST takes them. They are gone for all others then, so only the attribute says it, and one subscriber
//     alone may read them.
//   - GET /kv_event_sources of vLLM (entrypoints/serve/instrumentator/basic.py), if Options.Client is there.
//   - GET /server_info of SGLang (runtime_context.py, the member kv_events). Older versions do not name the ROUTER.
//
// SGLang's engines can also tell their load, many times a second, by a stream for each rank beside the events
// (--load-publish-endpoint, from 0.5.19 on). With Options.Loads these are read, too, and [Subscriber.Load] says how
// busy an engine is. The attribute loadEvents has the address in the form of kvEvents; else /server_info names the
// port.
//
// Of what an engine responds only ports are believed, so that no engine can lead the subscriber elsewhere. An engine
// whose socket connects (vLLM binds only addresses with *, "::" or ipc://) needs Options.Listen.
//
// A subscription counts as active when the engine has answered a PING that was sent after it. Only then the replay
// begins, so that no batch can fall between the two. Streams are clear text without authentication, and hold token ids:
// keep their ports inside.
package kvevents
