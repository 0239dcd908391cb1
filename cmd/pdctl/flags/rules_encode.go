// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"path"
	"slices"
	"strings"
)

// takes reports whether an engine takes embeddings from an encode stage.
func takes(e *Engine) bool { return e.Encoder != nil && e.Encoder.Role != "ec_producer" }

// encoding are the engines of an encode stage and those that take its embeddings.
func encoding(g *model) []side {
	var list []side
	for _, e := range g.encodes {
		list = append(list, side{e, e.Transfer})
	}
	return append(list, only((*model).all, func(s side) bool { return takes(s.Engine) })(g)...)
}

// encodeFolders are the engines that pass on embeddings in a folder.
var encodeFolders = only(encoding, func(s side) bool { return s.Encoder.Class == "ECExampleConnector" })

func encoderPath(s side) string { return folder(s.Encoder.Extra) }

// folder is the shared_storage_path of a connector, of an encode stage's too.
func folder(extra map[string]any) string {
	if p := text(extra, "shared_storage_path"); p != "" {
		return path.Clean(p)
	}
	return "/tmp"
}

// ofOneMachine reports whether a folder certainly is a machine's own.
func ofOneMachine(p string) bool {
	return !path.IsAbs(p) || p == "/tmp" || strings.HasPrefix(p, "/tmp/") || strings.HasPrefix(p, "/dev/shm")
}

// unshared returns one hit for engines that run on several machines and of which one keeps what it shares in a folder
// of its own machine.
func unshared(all func(*model) []side, folderOf func(side) string) func(*model) []hit {
	return func(g *model) []hit {
		sides := all(g)
		if !apart(enginesOf(sides)) ||
			!slices.ContainsFunc(sides, func(s side) bool { return ofOneMachine(folderOf(s)) }) {
			return nil
		}
		return []hit{{engines: enginesOf(sides)}}
	}
}

// hasEncodes reports whether there is an encode stage.
func (g *model) hasEncodes() bool { return len(g.encodes) > 0 }

var encodeRules = []rule{
	{code: "encode-alone", severity: Error,
		when: func(g *model) bool {
			return g.hasEncodes() && len(g.engines) > 0 && !slices.ContainsFunc(g.engines, takes)
		},
		find:   func(g *model) []hit { return []hit{{engines: g.encodes}} },
		text:   "encode media that no other engine takes over: each item is encoded twice",
		remedy: "start prefill engines with --ec-transfer-config too, with ec_role ec_consumer"},
	{code: "encode-differs", severity: Error, when: (*model).hasEncodes, among: encoding,
		equal:  func(s side) string { return s.Encoder.Class },
		text:   "pass embeddings on in different ways (ec_connector)",
		remedy: "write the same ec_connector for all of them"},
	{code: "encode-path-differs", severity: Error, when: (*model).hasEncodes, among: encodeFolders, equal: encoderPath,
		text: "keep embeddings in different folders (ec_connector_extra_config.shared_storage_path): none finds the " +
			"other's",
		remedy: "write the same shared_storage_path for all of them"},
	{code: "encode-path-local", severity: Error, when: (*model).hasEncodes, find: unshared(encodeFolders, encoderPath),
		text: "keep embeddings in a folder of each machine's own (shared_storage_path under /tmp, or relative): none " +
			"finds the other's",
		remedy: "write a folder that all machines mount"},
	{code: "encode-loopback", severity: Error, among: encoding, apart: true,
		bad: func(s side) bool {
			return !takes(s.Engine) && s.Encoder.Class == "ECCPUConnector" && yes(s.Encoder.Extra, "ec_enable_nixl") &&
				isLoopback(s.env["VLLM_EC_SIDE_CHANNEL_HOST"])
		},
		text:   "listens on its own machine's loopback only: prefill engines elsewhere cannot fetch its embeddings",
		remedy: "set VLLM_EC_SIDE_CHANNEL_HOST to an address of the engine's own machine that prefill engines reach"},
}
