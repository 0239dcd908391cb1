// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcache"
)

// LMCache's default port and a size that it needs.
const (
	redisPort   = 6379
	serverPort  = 5555 // of lmcache server (LMCacheMPConnector)
	defaultDisk = 10   // GB: with LMCache's own default of 0 it keeps nothing
)

// renderLMCache gives LMCache's file and vLLM's settings for one engine. P and D get the same, since both read and
// write one store.
func renderLMCache(k connector.KVConnector, _ json.RawMessage, t Target) (Settings, error) {
	c, ok := connector.As[*lmcache.Connector](k)
	if !ok {
		return Settings{}, ErrNoSettings
	}
	o, engine := c.Settings()
	r := &lmcacheEngine{engine: engine, t: t, o: &o}
	r.out = Settings{
		Engine:     "vllm",
		KVTransfer: &KVTransfer{Connector: lmcache.ClassV1, Role: "kv_both", Extra: engine.ExtraConfig()},
		Args:       []string{"--enable-prompt-tokens-details"},
		Env:        []EnvVar{{Name: "PYTHONHASHSEED", Value: "0"}},
	}
	r.note("settleTime", o.SettleTime != nil,
		"the gateway waits that long between the legs; no setting of an engine")
	r.note("engineClass", o.EngineClass != "", "kv_connector")
	if r.separate() {
		r.server()
	} else {
		r.inProcess()
	}
	for _, e := range engine.Extra {
		r.note(e.Path, true, "kv_connector_extra_config")
	}
	for _, e := range engine.Gone {
		r.noEffect(e.Path, e.Key)
	}
	if t.Resources.MaxBandwidth != "" {
		r.out.Notes = append(r.out.Notes,
			Note{NoEffect: true, Path: "resources.maxBandwidth", Text: "LMCache has no limit of bandwidth"})
	}
	return r.out, r.err
}

// lmcacheEngine builds one engine's settings.
type lmcacheEngine struct {
	engine lmcache.EngineConfig
	o      *lmcache.Options
	t      Target
	out    Settings
	file   lmcacheFile
	err    error
}

// note says which engine setting a given setting became.
func (r *lmcacheEngine) note(key string, given bool, text string) {
	if given {
		r.out.Notes = append(r.out.Notes, Note{Path: "config." + key, Text: text})
	}
}

func (r *lmcacheEngine) noEffect(key, text string) {
	r.out.Notes = append(r.out.Notes, Note{NoEffect: true, Path: "config." + key, Text: text})
}

// separate reports whether LMCache is a server beside the engines.
func (r *lmcacheEngine) separate() bool {
	if r.o.EngineClass != "" {
		return r.o.EngineClass == lmcache.ClassMP
	}
	for _, e := range r.engine.Extra {
		if strings.HasPrefix(e.Key, "lmcache.mp.") {
			return true
		}
	}
	return false
}

// inProcess renders LMCacheConnectorV1: each engine reads a file, and the engines share the store.
func (r *lmcacheEngine) inProcess() {
	name := "lmcache-" + r.t.Endpoint.Role.String() + "-" + strconv.Itoa(r.t.Index)
	if _, given := r.out.KVTransfer.Extra["lmcache_rpc_port"]; !given {
		// the name of a local socket, which must differ on one machine
		r.out.KVTransfer.Extra["lmcache_rpc_port"] = name
	}
	r.file.Set("chunk_size", 256)
	r.memory()
	r.disk()
	r.remote()
	r.policy("cache_policy", func(policy string) { r.file.Set("cache_policy", policy) })
	r.unmapped()
	for _, e := range r.engine.File {
		r.note(e.Path, true, "LMCache's "+e.Key)
		if e.Key == "remote_url" {
			r.file.Set(e.Key, r.withoutUser(e.Path, r.engine.Text(e.Key)))
			continue
		}
		r.file.Set(e.Key, e.Value)
	}
	if !r.shared() {
		r.noEffect("backendType",
			"nothing that is set here is shared: each engine finds only what it has stored itself, and D computes "+
				"every prompt again; "+
				"set backendType redis, serverEndpoints or remote_url")
	}
	r.out.Files = []File{{Name: name + ".yaml", Content: r.file.String()}}
	r.out.Env = append(r.out.Env, EnvVar{Name: "LMCACHE_CONFIG_FILE", Value: name + ".yaml"})
}

// memory renders the engine's own CPU memory, through which every chunk passes.
func (r *lmcacheEngine) memory() {
	o := r.o
	r.file.Set("local_cpu", true)
	size := int64(0)
	if l := o.LocalConfig; l != nil {
		size = l.MaxMemoryMB << 20
		r.note("localConfig.maxMemoryMB", true, "LMCache's max_local_cpu_size, in GB")
	}
	if o.MaxCacheSize > 0 {
		switch {
		case o.BackendType == "redis":
			r.noEffect("maxCacheSize", "Redis bounds itself: its own maxmemory")
		case o.BackendType == "disk":
			r.note("maxCacheSize", o.DiskConfig.MaxDiskSize == 0, "LMCache's max_local_disk_size, in GB")
			if o.DiskConfig.MaxDiskSize > 0 {
				r.noEffect("maxCacheSize", "diskConfig.maxDiskSize holds")
			}
		case size == 0:
			size = o.MaxCacheSize
			r.note("maxCacheSize", true, "LMCache's max_local_cpu_size, in GB")
		default:
			r.noEffect("maxCacheSize", "localConfig.maxMemoryMB holds")
		}
	}
	if q := r.t.Resources.MaxMemory; q != "" {
		limit, err := q.Bytes()
		if err != nil {
			r.err = &config.FieldError{Path: "resources.maxMemory", Problem: "cannot be read"}
		}
		if size == 0 || limit < size {
			size = limit
		}
		r.out.Notes = append(r.out.Notes,
			Note{Path: "resources.maxMemory", Text: "LMCache's max_local_cpu_size, in GB"})
	}
	if size > 0 {
		r.file.Set("max_local_cpu_size", lmcacheGB(size))
	} else {
		r.file.Set("max_local_cpu_size", 5)
	}
}

func (r *lmcacheEngine) disk() {
	d, size := r.o.DiskConfig, int64(0)
	if d != nil {
		r.file.Set("local_disk", d.CacheDir)
		r.note("diskConfig.cacheDir", true,
			"LMCache's local_disk; its index is in the engine's memory, so that no other engine finds what lies there")
		size = d.MaxDiskSize
		r.note("diskConfig.maxDiskSize", size > 0, "LMCache's max_local_disk_size, in GB")
		if size == 0 && r.o.BackendType == "disk" {
			size = r.o.MaxCacheSize
		}
	}
	if q := r.t.Resources.MaxDisk; q != "" {
		limit, err := q.Bytes()
		if err != nil {
			r.err = &config.FieldError{Path: "resources.maxDisk", Problem: "cannot be read"}
		}
		note := Note{Path: "resources.maxDisk", Text: "LMCache's max_local_disk_size, in GB"}
		if d == nil {
			note = Note{NoEffect: true, Path: "resources.maxDisk",
				Text: "no diskConfig is set, so that LMCache keeps nothing on disk"}
		} else if size == 0 || limit < size {
			size = limit
		}
		r.out.Notes = append(r.out.Notes, note)
	}
	if d == nil {
		return
	}
	if size > 0 {
		r.file.Set("max_local_disk_size", lmcacheGB(size))
	} else {
		r.file.Set("max_local_disk_size", defaultDisk)
	}
}

// remote renders the store that the engines share. LMCache has one at most.
func (r *lmcacheEngine) remote() {
	o, where := r.o, ""
	r.note("backendType", o.BackendType != "",
		map[string]string{"local": "LMCache's local_cpu", "redis": "LMCache's remote_url",
			"disk": "LMCache's local_disk"}[o.BackendType])
	if o.RedisConfig != nil {
		where = r.redis()
	}
	if len(o.ServerEndpoints) > 0 && where != "" {
		r.noEffect("serverEndpoints", "LMCache has one remote_url, which redisConfig has taken")
	} else if len(o.ServerEndpoints) > 0 {
		host, port, _ := net.SplitHostPort(o.ServerEndpoints[0])
		where = "lm://" + net.JoinHostPort(host, port)
		r.note("serverEndpoints", true, "LMCache's remote_url, the first of them")
		if len(o.ServerEndpoints) > 1 {
			r.noEffect("serverEndpoints[1]",
				"LMCache has one remote_url; this server and those that follow are not used")
		}
	}
	if where != "" {
		r.file.Set("remote_url", where)
		r.file.Set("remote_serde", "naive")
	}
}

// redis returns the address without user and password, which must not be in a file in clear text.
func (r *lmcacheEngine) redis() string {
	x := r.o.RedisConfig
	r.note("redisConfig.host", true, "LMCache's remote_url")
	r.note("redisConfig.port", true, "LMCache's remote_url")
	r.note("redisConfig.database", true, "LMCache's remote_url, where it is not 0")
	u := url.URL{Scheme: "redis",
		Host: net.JoinHostPort(strings.Trim(x.Host, "[]"), strconv.Itoa(cmp.Or(x.Port, redisPort)))}
	if x.Database != 0 {
		u.Path = "/" + strconv.Itoa(x.Database)
	}
	for _, k := range []struct{ name, value string }{{"username", x.Username}, {"password", x.Password}} {
		if k.value != "" {
			r.noEffect("redisConfig."+k.name, credentials)
		}
	}
	return u.String()
}

const credentials = "is not written into a file. LMCache takes it in remote_url only: set " +
	"LMCACHE_REMOTE_URL=redis://USER:PASSWORD@HOST:PORT/DATABASE " +
	"in the engines' environment, from a secret; it wins over the file"

// withoutUser removes user and password from a URL.
func (r *lmcacheEngine) withoutUser(path, raw string) string {
	scheme, rest, ok := strings.Cut(raw, "://")
	at := strings.LastIndexByte(rest, '@')
	if !ok || at < 0 {
		return raw
	}
	r.noEffect(path, "user and password: "+credentials)
	return scheme + "://" + rest[at+1:]
}

// policy writes the eviction policy in LMCache's spelling.
func (r *lmcacheEngine) policy(setting string, set func(string)) {
	if p := r.o.EvictionPolicy; p != "" {
		set(strings.ToUpper(p))
		r.note("evictionPolicy", true, "LMCache's "+setting)
	}
}

// unmapped notes the settings that LMCache does not have.
func (r *lmcacheEngine) unmapped() {
	if r.o.ConnectionTimeout != nil {
		r.noEffect("connectionTimeout",
			"LMCache has no limit for connecting; blocking_timeout_secs bounds how long an engine waits for a chunk")
	}
	if r.o.PoolSize != 0 {
		r.noEffect("poolSize", "LMCache sizes its connections to the store itself")
	}
	if r.o.TTL != nil {
		r.noEffect("ttl", "LMCache's chunks do not expire; they are evicted")
	}
}

// shared reports whether the file names a store that other engines read, too.
func (r *lmcacheEngine) shared() bool {
	return r.file.Has("remote_url") || r.engine.Bool("enable_p2p") || r.file.Has("external_lookup_client") ||
		r.file.Has("gds_path") || r.file.Has("remote_storage_plugins")
}

// server renders LMCacheMPConnector: one LMCache server, with a port for the engines.
func (r *lmcacheEngine) server() {
	o, kv := r.o, r.out.KVTransfer
	kv.Connector = lmcache.ClassMP
	host, port := "tcp://localhost", strconv.Itoa(serverPort)
	for i, e := range o.ServerEndpoints {
		if i > 0 {
			r.noEffect("serverEndpoints[1]",
				"P and D must use the same server; this one and those that follow are not used")
			break
		}
		h, p, _ := net.SplitHostPort(e)
		host, port = "tcp://"+bracketed(h), p
		r.note("serverEndpoints", true, "lmcache.mp.host and lmcache.mp.port")
	}
	if _, given := kv.Extra["lmcache.mp.host"]; !given {
		kv.Extra["lmcache.mp.host"] = host
	}
	if v, given := kv.Extra["lmcache.mp.port"]; given {
		port = fmt.Sprint(v)
	} else if n, err := strconv.Atoi(port); err == nil {
		kv.Extra["lmcache.mp.port"] = n
	}
	command := []string{"lmcache", "server", "--port", port, "--chunk-size",
		cmp.Or(r.engine.Text("chunk_size"), "256"), "--l1-size-gb", r.serverMemory()}
	policy := "LRU"
	if o.EvictionPolicy == "lfu" {
		r.noEffect("evictionPolicy", "lmcache server is known to evict by LRU only")
	} else {
		r.note("evictionPolicy", o.EvictionPolicy != "", "--eviction-policy of lmcache server")
	}
	command = append(command, "--eviction-policy", policy)
	if at := fmt.Sprint(kv.Extra["lmcache.mp.host"]); !loopback(strings.TrimPrefix(at, "tcp://")) {
		command = append(command, "--host", "0.0.0.0") // by default it listens on localhost only
	}
	if r.t.CPU {
		// By default the server moves the KV itself, which it can do on an accelerator only (LMCache 0.5.6).
		command = append(command, "--supported-transfer-mode", "engine_driven")
	}
	r.out.Companions = []Companion{{Name: "lmcache", Command: command}}
	r.serverHasNot()
	r.unmapped()
}

// serverMemory is the size of the server's first level, in GB.
func (r *lmcacheEngine) serverMemory() string {
	o, size := r.o, int64(0)
	if o.LocalConfig != nil {
		size = o.LocalConfig.MaxMemoryMB << 20
		r.note("localConfig.maxMemoryMB", true, "--l1-size-gb of lmcache server")
	}
	if o.MaxCacheSize > 0 {
		if size == 0 {
			size = o.MaxCacheSize
			r.note("maxCacheSize", true, "--l1-size-gb of lmcache server")
		} else {
			r.noEffect("maxCacheSize", "localConfig.maxMemoryMB holds")
		}
	}
	if q := r.t.Resources.MaxMemory; q != "" {
		limit, err := q.Bytes()
		if err != nil {
			r.err = &config.FieldError{Path: "resources.maxMemory", Problem: "cannot be read"}
		}
		if size == 0 || limit < size {
			size = limit
		}
		r.out.Notes = append(r.out.Notes,
			Note{Path: "resources.maxMemory", Text: "--l1-size-gb of lmcache server"})
	}
	if size == 0 {
		return "5"
	}
	return lmcacheGB(size).String()
}

// serverHasNot notes the settings that only the in-process class has. Where a server keeps KV besides its memory is a
// matter of its own configuration, which Render does not write.
func (r *lmcacheEngine) serverHasNot() {
	o := r.o
	const text = "a setting of LMCacheConnectorV1; the second level of lmcache server is configured at the server"
	if o.BackendType != "" && o.BackendType != "local" {
		r.noEffect("backendType", text)
	} else {
		r.note("backendType", o.BackendType != "", "the memory of lmcache server")
	}
	if x := o.RedisConfig; x != nil {
		r.noEffect("redisConfig", text)
	}
	if o.DiskConfig != nil {
		r.noEffect("diskConfig", text)
	}
	if r.t.Resources.MaxDisk != "" {
		r.out.Notes = append(r.out.Notes, Note{NoEffect: true, Path: "resources.maxDisk", Text: text})
	}
	for _, e := range r.engine.File {
		if e.Key == "chunk_size" {
			r.note(e.Path, true, "--chunk-size of lmcache server")
			continue
		}
		r.noEffect(e.Path, "a setting of LMCacheConnectorV1's file, which LMCacheMPConnector does not read")
	}
}

func bracketed(host string) string {
	if strings.Contains(host, ":") {
		return "[" + host + "]"
	}
	return host
}
