// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/pdkit/pdkit/discovery"
)

// The attributes that the source can add, by the names that connectors read.
const (
	attrDPSize        = "dpSize"
	attrDPSizeLocal   = "dpSizeLocal"
	attrDPStartRank   = "dpStartRank"
	attrBootstrapPort = "bootstrapPort"
	attrBootstrapURL  = "bootstrapURL"
	attrMaxModelLen   = "maxModelLen"
	attrAdapters      = "adapters"
)

const (
	maxText  = 256   // bytes of a model's name, a version, an engine id
	maxRanks = 65535 // no engine has more

	maxAdapters = 1024 // of an engine that go into its entry
)

var errSenseless = errors.New("the response makes no sense")

// sameFacts reports whether two readings add the same facts to an endpoint.
func (r *Reading) sameFacts(o *Reading) bool {
	return r.Model == o.Model && r.Version == o.Version && r.DPSize == o.DPSize &&
		r.DPStartRank == o.DPStartRank && r.BootstrapPort == o.BootstrapPort &&
		r.MaxModelLen == o.MaxModelLen && slices.Equal(r.Adapters, o.Adapters)
}

// fill adds the facts that the list lacks. It copies the attributes, since the list shares its map.
func (r *Reading) fill(e *discovery.Endpoint) {
	if e.Model == "" {
		e.Model = r.Model
	}
	if e.Version == "" {
		e.Version = r.Version
	}
	add := map[string]string{}
	set := func(name string, n int) {
		if _, said := e.Attributes[name]; !said {
			add[name] = strconv.Itoa(n)
		}
	}
	if r.DPStartRank == 0 && r.DPSize > 1 {
		set(attrDPSize, r.DPSize)
	}
	size, said := e.Attributes[attrDPSize]
	if n, err := strconv.Atoi(size); r.DPStartRank > 0 && (!said || err == nil && n >= r.DPSize) {
		set(attrDPSizeLocal, r.DPSize)
		set(attrDPStartRank, r.DPStartRank)
	}
	if r.BootstrapPort > 0 && e.Role.Has(discovery.RolePrefill) {
		set(attrBootstrapPort, r.BootstrapPort)
	}
	if r.MaxModelLen > 0 {
		set(attrMaxModelLen, r.MaxModelLen)
	}
	if _, said := e.Attributes[attrAdapters]; !said && len(r.Adapters) > 0 {
		add[attrAdapters] = strings.Join(r.Adapters, ",")
	}
	if len(add) == 0 {
		return
	}
	maps.Copy(add, e.Attributes)
	e.Attributes = add
}

// goodText reports whether a text is readable and short enough for a list.
func goodText(s string) bool {
	return s != "" && len(s) <= maxText && utf8.ValidString(s) &&
		!strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}

// models is what /v1/models says.
type models struct {
	name     string // the wanted model, if it is listed, else the first that is not an adapter of another one
	length   int    // of its context, in tokens; 0: not said
	adapters []string
}

// card is one model of /v1/models. Engines list a model once for each of its names, with the same root.
type card struct {
	ID     string  `json:"id"`
	Parent *string `json:"parent"`
	Root   string  `json:"root"`
	Length *int    `json:"max_model_len"`
}

func (c *card) isAdapter() bool { return c.Parent != nil && *c.Parent != "" }

// parseModels reads the response. If a model is wanted, adapters of another one are left out.
func parseModels(body []byte, wanted string) (m models, err error) {
	var list struct {
		Data []card `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil {
		return m, errSenseless
	}
	var own *card
	for i := range list.Data {
		c := &list.Data[i]
		if goodText(c.ID) && !c.isAdapter() && (own == nil || c.ID == wanted && own.ID != wanted) {
			own = c
		}
	}
	if own == nil {
		return m, errSenseless
	}
	if m.name = own.ID; own.Length != nil && *own.Length > 0 {
		m.length = *own.Length
	}
	for i := range list.Data {
		c := &list.Data[i]
		if c.isAdapter() && goodText(c.ID) && !strings.Contains(c.ID, ",") && len(m.adapters) < maxAdapters &&
			(wanted == "" || own.isParent(*c.Parent, list.Data)) {
			m.adapters = append(m.adapters, c.ID)
		}
	}
	slices.Sort(m.adapters)
	m.adapters = slices.Compact(m.adapters)
	return m, nil
}

// isParent reports whether a name of an adapter's parent is one of the model's. vLLM takes any name for it
// (--lora-modules with base_model_name), mostly that of the weights, which is the model's root.
func (c *card) isParent(name string, all []card) bool {
	return name == c.ID || c.Root != "" && (name == c.Root || slices.ContainsFunc(all, func(other card) bool {
		return other.ID == name && other.Root == c.Root && !other.isAdapter()
	}))
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

// parseQuery reads the response of Mooncake's bootstrap server. It ignores unknown members, since newer servers have
// more.
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

// serverInfo has the members of SGLang's server_info that are read. Never add a field for a secret: the response holds
// the server's API keys.
type serverInfo struct {
	Version       string `json:"version"`
	DPSize        int    `json:"dp_size"`
	Mode          string `json:"disaggregation_mode"`
	BootstrapPort int    `json:"disaggregation_bootstrap_port"`
}

func parseServerInfo(body []byte) (info serverInfo, err error) {
	if json.Unmarshal(body, &info) != nil || info.DPSize < 1 || info.DPSize > maxRanks {
		return serverInfo{}, errSenseless // TensorRT-LLM's response, which has none of these members, or nonsense
	}
	if !goodText(info.Version) {
		info.Version = ""
	}
	if info.Mode != "prefill" || info.BootstrapPort < 1 || info.BootstrapPort > 65535 {
		info.BootstrapPort = 0
	}
	return info, nil
}

// ranksOf returns the first rank and how many there are, without a gap. If ranks are missing between, they are
// elsewhere, and a number would send requests to ranks that are not here: then both are 0.
func ranksOf[T any](ranks map[int]T) (start, n int) {
	if len(ranks) > 0 {
		start = slices.Min(slices.Collect(maps.Keys(ranks)))
	}
	for i := range len(ranks) {
		if _, ok := ranks[start+i]; !ok {
			return 0, 0
		}
	}
	return start, len(ranks)
}
