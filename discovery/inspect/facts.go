// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"encoding/json"
	"errors"
	"maps"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/pdkit/pdkit/discovery"
)

// The attributes that an engine's answers may become, by the names that the connectors read.
const (
	attrDPSize        = "dpSize"
	attrBootstrapPort = "bootstrapPort"
	attrBootstrapURL  = "bootstrapURL"
)

const (
	maxText  = 256   // bytes of a model's name, a version, an engine id
	maxRanks = 65535 // no engine has more
)

var errSenseless = errors.New("the answer makes no sense")

// sameFacts reports whether two readings fill an endpoint alike.
func (r *Reading) sameFacts(o *Reading) bool {
	return r.Model == o.Model && r.Version == o.Version && r.DPSize == o.DPSize && r.BootstrapPort == o.BootstrapPort
}

// fill writes what the list lacks. The list's map is shared and stays as it is.
func (r *Reading) fill(e *discovery.Endpoint) {
	if e.Model == "" {
		e.Model = r.Model
	}
	if e.Version == "" {
		e.Version = r.Version
	}
	add := map[string]string{}
	if _, said := e.Attributes[attrDPSize]; !said && r.DPSize > 1 {
		add[attrDPSize] = strconv.Itoa(r.DPSize)
	}
	if _, said := e.Attributes[attrBootstrapPort]; !said && r.BootstrapPort > 0 && e.Role.Has(discovery.RolePrefill) {
		add[attrBootstrapPort] = strconv.Itoa(r.BootstrapPort)
	}
	if len(add) == 0 {
		return
	}
	maps.Copy(add, e.Attributes)
	e.Attributes = add
}

// goodText is a text that an operator can read and a list can hold.
func goodText(s string) bool {
	return s != "" && len(s) <= maxText && utf8.ValidString(s) &&
		!strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// parseModels returns the first model that is not an adapter of another.
func parseModels(body []byte) (string, error) {
	var list struct {
		Data []struct {
			ID     string  `json:"id"`
			Parent *string `json:"parent"`
		} `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil {
		return "", errSenseless
	}
	for _, m := range list.Data {
		if (m.Parent == nil || *m.Parent == "") && goodText(m.ID) {
			return m.ID, nil
		}
	}
	return "", errSenseless
}

func parseVersion(body []byte) (string, error) {
	var v struct {
		Version string `json:"version"`
	}
	if json.Unmarshal(body, &v) != nil || !goodText(v.Version) {
		return "", errSenseless
	}
	return v.Version, nil
}

// parseQuery reads Mooncake's bootstrap server. Members that it does not know are left alone: newer servers have more.
func parseQuery(body []byte) (map[int]string, error) {
	var ranks map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if json.Unmarshal(body, &ranks) != nil || len(ranks) == 0 {
		return nil, errSenseless
	}
	ids := make(map[int]string, len(ranks))
	for text, rank := range ranks {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n >= maxRanks || !goodText(rank.EngineID) {
			return nil, errSenseless
		}
		ids[n] = rank.EngineID
	}
	return ids, nil
}

// serverInfo is what is read of SGLang's server_info. It must not grow a field for anything secret: the answer holds
// the server's API keys.
type serverInfo struct {
	Version       string `json:"version"`
	DPSize        int    `json:"dp_size"`
	Mode          string `json:"disaggregation_mode"`
	BootstrapPort int    `json:"disaggregation_bootstrap_port"`
}

func parseServerInfo(body []byte) (info serverInfo, err error) {
	if json.Unmarshal(body, &info) != nil || info.DPSize < 1 || info.DPSize > maxRanks {
		return serverInfo{}, errSenseless // TensorRT-LLM's, which has none of this, or nonsense
	}
	if !goodText(info.Version) {
		info.Version = ""
	}
	if info.Mode != "prefill" || info.BootstrapPort < 1 || info.BootstrapPort > 65535 {
		info.BootstrapPort = 0
	}
	return info, nil
}

// ranksOf returns the number of ranks if they are 0 to n-1, else 0: then others are elsewhere, and a number would send
// requests to ranks that are not here.
func ranksOf[T any](ranks map[int]T) int {
	for i := range len(ranks) {
		if _, ok := ranks[i]; !ok {
			return 0
		}
	}
	return len(ranks)
}
