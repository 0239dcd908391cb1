// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// moriioFlags are the flags for engines with MoRIIOConnector in write mode. llm-d has them beside
// --kv-connector=nixlv2; here they choose pdkit's connector moriio. Engines in read mode use NIXL's protocol and need
// none of these flags.
type moriioFlags struct {
	write, parallel                 bool
	podIP                           string
	decodeHandshake, decodeNotify   int
	prefillHandshake, prefillNotify int
	tp, dp, dpLocal                 int
	decodeHosts, remoteHosts        string // pods' addresses, with commas between
}

func (m *moriioFlags) define(fs *flag.FlagSet, getenv func(string) string) {
	fs.BoolVar(&m.write, "moriio-write-mode", false, "the engines run MoRIIOConnector in write mode")
	fs.BoolVar(&m.parallel, "moriio-parallel-dispatch", false, "send both legs at once, for --moriio-write-mode")
	fs.StringVar(&m.podIP, "moriio-local-pod-ip", getenv("POD_IP"),
		"the `ADDRESS` at which prefill engines reach the decode engine")
	fs.IntVar(&m.decodeHandshake, "moriio-decode-handshake-port", 6301, "the decode engine's handshake `PORT`")
	fs.IntVar(&m.decodeNotify, "moriio-decode-notify-port", 61005, "the decode engine's notify `PORT`")
	fs.IntVar(&m.prefillHandshake, "moriio-prefill-handshake-port", 6301, "the prefill engines' handshake `PORT`")
	fs.IntVar(&m.prefillNotify, "moriio-prefill-notify-port", 61005, "the prefill engines' notify `PORT`")
	fs.IntVar(&m.tp, "moriio-tp-size", 1, "the engines' tensor-parallel `SIZE`")
	fs.IntVar(&m.dp, "moriio-dp-size", 1, "the engines' data-parallel `SIZE`, of all pods of an engine")
	fs.IntVar(&m.dpLocal, "moriio-dp-size-local", 0, "the `SIZE` behind one port, of an engine over several pods")
	fs.StringVar(&m.decodeHosts, "moriio-decode-hosts", "",
		"the `ADDRESSES` of the decode engine's pods, in the order of their ranks")
	fs.StringVar(&m.remoteHosts, "moriio-remote-hosts", "",
		"the `ADDRESSES` of a prefill engine's pods; not used: decode learns only the pod that the request went to")
}

func (m *moriioFlags) check(f *flags) string {
	switch {
	case m.parallel && !m.write:
		return "--moriio-parallel-dispatch has no use without --moriio-write-mode"
	case !m.write:
		return ""
	case f.kvConnector != "nixlv2":
		return "--moriio-write-mode goes with --kv-connector=nixlv2"
	case f.ranks > 1:
		return "--moriio-write-mode and --data-parallel-size exclude each other: use --moriio-dp-size for ranks " +
			"behind one port"
	}
	if _, err := netip.ParseAddr(m.podIP); err != nil {
		return "--moriio-local-pod-ip, or POD_IP, is not an IP address: the decode engine's, as prefill engines " +
			"reach it"
	}
	return m.checkPods()
}

func (m *moriioFlags) checkPods() string {
	if m.dpLocal < 0 || m.dpLocal > m.dp {
		return "--moriio-dp-size-local is not from 1 to --moriio-dp-size"
	}
	if m.dpLocal == 0 || m.dpLocal == m.dp {
		return ""
	}
	hosts := strings.Split(m.decodeHosts, ",")
	for _, h := range hosts {
		if _, err := netip.ParseAddr(strings.TrimSpace(h)); err != nil {
			return "--moriio-decode-hosts is not a list of IP addresses, as --moriio-dp-size-local wants it"
		}
	}
	if pods := (m.dp + m.dpLocal - 1) / m.dpLocal; len(hosts) != pods {
		return fmt.Sprintf("--moriio-decode-hosts does not name %d pods, each of --moriio-dp-size-local ranks", pods)
	}
	return ""
}

// config adds the settings of pdkit's connector. Unless a flag says otherwise, llm-d sends the legs of engines in write
// mode one after the other. The setting mode read does that here.
func (m *moriioFlags) config(config map[string]any) {
	config["mode"] = "read"
	if m.parallel {
		config["mode"] = "write"
	}
	config["handshakePort"], config["notifyPort"] = m.prefillHandshake, m.prefillNotify
	config["tpSize"], config["dpSize"], config["dpSizeLocal"] = m.tp, m.dp, m.dpLocal
}

// attributes are the decode engine's. They are needed because its URL names loopback.
func (m *moriioFlags) attributes() map[string]string {
	return map[string]string{
		"zmqAddress": fmt.Sprintf("host:%s,handshake:%d,notify:%d", m.podIP, m.decodeHandshake, m.decodeNotify),
		"dpSize":     strconv.Itoa(m.dp), "pods": m.decodeHosts,
	}
}
