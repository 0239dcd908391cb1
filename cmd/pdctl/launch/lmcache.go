// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
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
func renderLMCache(c *lmcache.Connector, t Target) (Settings, error) {
	o, engine := c.Settings()
	r := &lmcacheEngine{engine: engine, t: t, o: &o}
	r.Settings = vllm(&KVTransfer{Connector: lmcache.ClassV1, Role: "kv_both", Extra: engine.ExtraConfig()})
	r.set("PYTHONHASHSEED", "0")
	r.became(o.SettleTime != nil, "settleTime", settleTime)
	r.became(o.EngineClass != "", "engineClass", "kv_connector")
	if r.separate() {
		r.server()
	} else {
		r.inProcess()
	}
	for _, e := range engine.Extra {
		r.became(true, e.Path, "kv_connector_extra_config")
	}
	for _, e := range engine.Gone {
		r.noEffect(true, e.Path, e.Key)
	}
	r.idleIf(t.Resources.MaxBandwidth != "", "resources.maxBandwidth", "LMCache has no limit of bandwidth")
	return r.Settings, r.err
}

// lmcacheEngine builds one engine's settings.
type lmcacheEngine struct {
	lmcacheOutput
	engine lmcache.EngineConfig
	o      *lmcache.Options
	t      Target
	err    error
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
	if _, given := r.KVTransfer.Extra["lmcache_rpc_port"]; !given {
		// the name of a local socket, which must differ on one machine
		r.KVTransfer.Extra["lmcache_rpc_port"] = name
	}
	r.file.Set("chunk_size", 256)
	r.memory()
	r.disk()
	r.remote()
	if p := r.o.EvictionPolicy; p != "" {
		r.file.Set("cache_policy", strings.ToUpper(p)) // in LMCache's spelling
		r.became(true, "evictionPolicy", "LMCache's cache_policy")
	}
	r.unmapped()
	for _, e := range r.engine.File {
		r.became(true, e.Path, "LMCache's "+e.Key)
		if e.Key == "remote_url" {
			r.file.Set(e.Key, r.withoutUser(e.Path, r.engine.Text(e.Key)))
			continue
		}
		r.file.Set(e.Key, e.Value)
	}
	r.noEffect(!r.shared(), "backendType", "nothing that is set here is shared: each engine finds only what it has "+
		"stored itself, and D computes every prompt again; set backendType redis, serverEndpoints or remote_url")
	r.keep(name + ".yaml")
}

// memory renders the engine's own CPU memory, through which every chunk passes.
func (r *lmcacheEngine) memory() {
	const where = "LMCache's max_local_cpu_size, in GB"
	o := r.o
	r.file.Set("local_cpu", true)
	size := r.localConfig(where)
	switch {
	case o.MaxCacheSize <= 0:
	case o.BackendType == "redis":
		r.noEffect(true, "maxCacheSize", "Redis bounds itself: its own maxmemory")
	case o.BackendType == "disk":
		r.became(o.DiskConfig.MaxDiskSize == 0, "maxCacheSize", "LMCache's max_local_disk_size, in GB")
		r.noEffect(o.DiskConfig.MaxDiskSize > 0, "maxCacheSize", "diskConfig.maxDiskSize holds")
	default:
		size = r.maxCacheSize(size, where)
	}
	r.file.Set("max_local_cpu_size", gbOr(r.limited(size, "resources.maxMemory", r.t.Resources.MaxMemory), 5))
	r.noteIf(r.t.Resources.MaxMemory != "", "resources.maxMemory", where)
}

// localConfig is the size that localConfig names, or 0.
func (r *lmcacheEngine) localConfig(where string) int64 {
	if r.o.LocalConfig == nil {
		return 0
	}
	r.became(true, "localConfig.maxMemoryMB", where)
	return r.o.LocalConfig.MaxMemoryMB << 20
}

// maxCacheSize is the size of a memory: that of localConfig, or else maxCacheSize.
func (r *lmcacheEngine) maxCacheSize(size int64, where string) int64 {
	r.noEffect(size > 0, "maxCacheSize", "localConfig.maxMemoryMB holds")
	r.became(size == 0, "maxCacheSize", where)
	return cmp.Or(size, r.o.MaxCacheSize)
}

// limited is a size, or a limit of the resources where that is smaller. A size of 0 is not known.
func (r *lmcacheEngine) limited(size int64, path string, q config.Quantity) int64 {
	if q == "" {
		return size
	}
	limit, err := q.Bytes()
	if err != nil {
		r.err = refuse(path, "cannot be read", "")
	}
	if size == 0 || limit < size {
		return limit
	}
	return size
}

func (r *lmcacheEngine) disk() {
	const where = "LMCache's max_local_disk_size, in GB"
	d, q := r.o.DiskConfig, r.t.Resources.MaxDisk
	if d == nil {
		r.limited(0, "resources.maxDisk", q) // tells a limit that cannot be read
		r.idleIf(q != "", "resources.maxDisk", "no diskConfig is set, so that LMCache keeps nothing on disk")
		return
	}
	r.file.Set("local_disk", d.CacheDir)
	r.became(true, "diskConfig.cacheDir",
		"LMCache's local_disk; its index is in the engine's memory, so that no other engine finds what lies there")
	r.became(d.MaxDiskSize > 0, "diskConfig.maxDiskSize", where)
	size := d.MaxDiskSize
	if r.o.BackendType == "disk" {
		size = cmp.Or(size, r.o.MaxCacheSize)
	}
	r.file.Set("max_local_disk_size", gbOr(r.limited(size, "resources.maxDisk", q), defaultDisk))
	r.noteIf(q != "", "resources.maxDisk", where)
}

// remote renders the store that the engines share. LMCache has one at most.
func (r *lmcacheEngine) remote() {
	o, where := r.o, ""
	r.became(o.BackendType != "", "backendType",
		map[string]string{"local": "LMCache's local_cpu", "redis": "LMCache's remote_url",
			"disk": "LMCache's local_disk"}[o.BackendType])
	if o.RedisConfig != nil {
		where = r.redis()
	}
	if len(o.ServerEndpoints) > 0 && where != "" {
		r.noEffect(true, "serverEndpoints", "LMCache has one remote_url, which redisConfig has taken")
	} else if len(o.ServerEndpoints) > 0 {
		host, port, _ := net.SplitHostPort(o.ServerEndpoints[0])
		where = "lm://" + net.JoinHostPort(host, port)
		r.became(true, "serverEndpoints", "LMCache's remote_url, the first of them")
		r.noEffect(len(o.ServerEndpoints) > 1, "serverEndpoints[1]",
			"LMCache has one remote_url; this server and those that follow are not used")
	}
	if where != "" {
		r.file.Set("remote_url", where)
		r.file.Set("remote_serde", "naive")
	}
}

// redis returns the address without user and password, which must not be in a file in clear text.
func (r *lmcacheEngine) redis() string {
	x := r.o.RedisConfig
	r.became(true, "redisConfig.host", "LMCache's remote_url")
	r.became(true, "redisConfig.port", "LMCache's remote_url")
	r.became(true, "redisConfig.database", "LMCache's remote_url, where it is not 0")
	u := url.URL{Scheme: "redis",
		Host: net.JoinHostPort(strings.Trim(x.Host, "[]"), strconv.Itoa(cmp.Or(x.Port, redisPort)))}
	if x.Database != 0 {
		u.Path = "/" + strconv.Itoa(x.Database)
	}
	r.noEffect(x.Username != "", "redisConfig.username", credentials)
	r.noEffect(x.Password != "", "redisConfig.password", credentials)
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
	r.noEffect(true, path, "user and password: "+credentials)
	return scheme + "://" + rest[at+1:]
}

// unmapped notes the settings that LMCache does not have.
func (r *lmcacheEngine) unmapped() {
	r.noEffect(r.o.ConnectionTimeout != nil, "connectionTimeout",
		"LMCache has no limit for connecting; blocking_timeout_secs bounds how long an engine waits for a chunk")
	r.noEffect(r.o.PoolSize != 0, "poolSize", "LMCache sizes its connections to the store itself")
	r.noEffect(r.o.TTL != nil, "ttl", "LMCache's chunks do not expire; they are evicted")
}

// shared reports whether the file names a store that other engines read, too.
func (r *lmcacheEngine) shared() bool {
	return r.file.Has("remote_url") || r.engine.Bool("enable_p2p") || r.file.Has("external_lookup_client") ||
		r.file.Has("gds_path") || r.file.Has("remote_storage_plugins")
}

// server renders LMCacheMPConnector: one LMCache server, with a port for the engines.
func (r *lmcacheEngine) server() {
	o, kv := r.o, r.KVTransfer
	kv.Connector = lmcache.ClassMP
	host, port := "tcp://localhost", strconv.Itoa(serverPort)
	for i, e := range o.ServerEndpoints {
		if i > 0 {
			r.noEffect(true, "serverEndpoints[1]",
				"P and D must use the same server; this one and those that follow are not used")
			break
		}
		h, p, _ := net.SplitHostPort(e)
		host, port = "tcp://"+bracketed(h), p
		r.became(true, "serverEndpoints", "lmcache.mp.host and lmcache.mp.port")
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
	r.noEffect(o.EvictionPolicy == "lfu", "evictionPolicy", "lmcache server is known to evict by LRU only")
	r.became(o.EvictionPolicy != "" && o.EvictionPolicy != "lfu", "evictionPolicy",
		"--eviction-policy of lmcache server")
	command = append(command, "--eviction-policy", "LRU")
	if at := fmt.Sprint(kv.Extra["lmcache.mp.host"]); !loopback(strings.TrimPrefix(at, "tcp://")) {
		command = append(command, "--host", "0.0.0.0") // by default it listens on localhost only
	}
	if r.t.CPU {
		// By default the server moves the KV itself, which it can do on an accelerator only (LMCache 0.5.6).
		command = append(command, "--supported-transfer-mode", "engine_driven")
	}
	r.Companions = []Companion{{Name: "lmcache", Command: command}}
	r.serverHasNot()
	r.unmapped()
}

// serverMemory is the size of the server's first level, in GB.
func (r *lmcacheEngine) serverMemory() string {
	const where = "--l1-size-gb of lmcache server"
	size := r.localConfig(where)
	if r.o.MaxCacheSize > 0 {
		size = r.maxCacheSize(size, where)
	}
	size = r.limited(size, "resources.maxMemory", r.t.Resources.MaxMemory)
	r.noteIf(r.t.Resources.MaxMemory != "", "resources.maxMemory", where)
	return gbOr(size, 5).String()
}

// serverHasNot notes the settings that only the in-process class has. Where a server keeps KV besides its memory is a
// matter of its own configuration, which Render does not write.
func (r *lmcacheEngine) serverHasNot() {
	o := r.o
	const text = "a setting of LMCacheConnectorV1; the second level of lmcache server is configured at the server"
	r.noEffect(o.BackendType != "" && o.BackendType != "local", "backendType", text)
	r.became(o.BackendType == "local", "backendType", "the memory of lmcache server")
	r.noEffect(o.RedisConfig != nil, "redisConfig", text)
	r.noEffect(o.DiskConfig != nil, "diskConfig", text)
	r.idleIf(r.t.Resources.MaxDisk != "", "resources.maxDisk", text)
	for _, e := range r.engine.File {
		chunk := e.Key == "chunk_size"
		r.became(chunk, e.Path, "--chunk-size of lmcache server")
		r.noEffect(!chunk, e.Path, "a setting of LMCacheConnectorV1's file, which LMCacheMPConnector does not read")
	}
}

func bracketed(host string) string {
	if strings.Contains(host, ":") {
		return "[" + host + "]"
	}
	return host
}
