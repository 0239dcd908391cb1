// SPDX-License-Identifier: Apache-2.0

package nixlpush

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// The attributes of a prefill engine.
const (
	attrEngineID = "engineID"        // engine_id of its kv_transfer_config
	attrHost     = "sideChannelHost" // VLLM_NIXL_SIDE_CHANNEL_HOST; the host of the rank's pod where left out
	attrPort     = "sideChannelPort" // VLLM_NIXL_SIDE_CHANNEL_PORT
	attrTPSize   = attr.TPSize       // its tensor-parallel size
	attrPPSize   = attr.PPSize       // its pipeline-parallel size
)

// maxRanks bounds the sizes. No engine has more ranks, so a larger number is a mistake.
const maxRanks = 65535

// coordinates say where D registers with P.
type coordinates struct {
	engineID, host string
	port, tp, pp   int
}

// coordinatesOf reads P's attributes. If P has several data-parallel ranks, each rank has its own engine id,
// "<engine_id>_dp<rank>", and its own side channel, at the first port plus the rank (docs/protocols/vllm.md §8). The
// rank is the number among those of all pods.
func coordinatesOf(s *connector.Session) (coordinates, error) {
	at, ranks, err := readAttributes(s.Prefill)
	if err == nil && ranks.Size > 1 {
		rank := ranks.Start + s.PrefillRank
		at.engineID += "_dp" + strconv.Itoa(rank)
		at.port += rank
		if strings.TrimSpace(s.Prefill.Attribute(attrHost)) == "" {
			at.host, err = ranks.Host(s.Prefill, s.PrefillRank)
		}
	}
	return at, err
}

func readAttributes(e discovery.Endpoint) (at coordinates, ranks attr.Ranks, err error) {
	var errs [8]error
	at.engineID, errs[0] = attr.Text(e, attrEngineID)
	at.port, errs[1] = attr.Port(e, attrPort, 0)
	at.tp, errs[2] = attr.Int(e, attrTPSize, 1, 1, maxRanks)
	at.pp, errs[3] = attr.Int(e, attrPPSize, 1, 1, maxRanks)
	ranks, errs[4] = attr.RanksOf(e)
	if at.host = strings.TrimSpace(e.Attribute(attrHost)); at.host == "" {
		at.host = e.Host()
	}
	if errs[4] == nil {
		_, errs[7] = ranks.Host(e, 0)
	}
	if strings.ContainsAny(at.host, " /[]@") {
		errs[6] = &attr.Error{Endpoint: e.ID, Attribute: attrHost,
			Problem: "is not a host's name or address"}
	}
	if at.port+ranks.Start+ranks.Local-1 > 65535 {
		errs[5] = &attr.Error{Endpoint: e.ID, Attribute: attrPort,
			Problem: "leaves no ports for the other data-parallel ranks"}
	}
	for _, err := range errs {
		if err != nil {
			return at, ranks, errors.Join(errs[:]...)
		}
	}
	return at, ranks, nil
}

// static returns the decode leg's parameters when P has not answered yet. vLLM reads all of them but pp_size without a
// default, and the engine dies if one is missing (push_scheduler.py, metadata.py).
func static(s *connector.Session) (json.RawMessage, error) {
	at, err := coordinatesOf(s)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 0, 256)
	b = append(b, `{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":`...)
	b = append(b, connector.Quote(at.engineID)...)
	b = append(b, `,"remote_host":`...)
	b = append(b, connector.Quote(at.host)...)
	b = append(b, `,"remote_port":`...)
	b = strconv.AppendInt(b, int64(at.port), 10)
	b = append(b, `,"tp_size":`...)
	b = strconv.AppendInt(b, int64(at.tp), 10)
	b = append(b, `,"pp_size":`...)
	b = strconv.AppendInt(b, int64(at.pp), 10)
	b = append(b, `,"remote_request_id":"`...)
	b = append(b, s.ID...) // hex digits
	return append(b, `"}`...), nil
}

// CheckEndpoint requires the attributes of a prefill engine from which D learns where P is before P has answered.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	if c.serial || !e.Role.Has(discovery.RolePrefill) {
		return nil
	}
	_, _, err := readAttributes(e)
	return attr.Faults(err, remedies)
}

var remedies = map[string]string{
	attrEngineID: "the engine_id of the prefill engine's kv_transfer_config, which must be fixed there",
	attrHost: "the prefill engine's VLLM_NIXL_SIDE_CHANNEL_HOST, as decode engines reach it; the URL's host " +
		"where left out",
	attrPort:         "the prefill engine's VLLM_NIXL_SIDE_CHANNEL_PORT",
	attrTPSize:       "the prefill engine's tensor-parallel size, 1 where left out",
	attrPPSize:       "the prefill engine's pipeline-parallel size, 1 where left out",
	attr.DPSize:      "the prefill engine's data-parallel size, 1 where left out",
	attr.DPSizeLocal: "how many of its ranks are behind this URL, all where left out",
	attr.DPStartRank: "the number of the first rank behind this URL, 0 where left out",
	attr.Pods:        "the hosts of all pods of the engine, in the order of their ranks: 10.0.0.5,10.0.0.7",
}
