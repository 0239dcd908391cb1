// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"encoding/json"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/internal/lmcacheconf"
)

// The engine classes for which this connector is.
const (
	ClassV1 = "LMCacheConnectorV1" // LMCache inside the engine's process
	ClassMP = "LMCacheMPConnector" // LMCache as a server of its own
)

// Options are the connector's settings: pdkit's own two, and every key that the design documents give LMCache, in their
// YAML and in their Go structs. The documents' keys describe the engines' side. This package checks them, and renders
// those for which LMCache has a setting; they do not change the legs.
type Options struct {
	// the wait between the legs, since the store's put is asynchronous; default 0
	SettleTime *config.Duration `json:"settleTime"`
	// which class is rendered: LMCacheConnectorV1 (default) or LMCacheMPConnector
	EngineClass string `json:"engineClass"`

	ServerEndpoints   []string         `json:"serverEndpoints"` // LMCache servers, host:port
	BackendType       string           `json:"backendType"`     // local, redis, disk
	LocalConfig       *LocalConfig     `json:"localConfig"`
	RedisConfig       *RedisConfig     `json:"redisConfig"`
	DiskConfig        *DiskConfig      `json:"diskConfig"`
	ConnectionTimeout *config.Duration `json:"connectionTimeout"`
	PoolSize          int              `json:"poolSize"`
	MaxCacheSize      int64            `json:"maxCacheSize"` // bytes
	TTL               *config.Duration `json:"ttl"`
	EvictionPolicy    string           `json:"evictionPolicy"` // lru, lfu

	// Engine are LMCache's own settings under its own names: those of its file (chunk_size, or lmcache.chunk_size) and
	// those of vLLM's kv_connector_extra_config (discard_partial_chunks). In JSON they stand beside the other settings.
	Engine map[string]json.RawMessage `json:"-"`
}

// LocalConfig is the documents' LocalLMCacheConfig.
type LocalConfig struct {
	MaxMemoryMB int64 `json:"maxMemoryMB"` // 2^20 bytes
}

// RedisConfig is the documents' RedisLMCacheConfig. Username and password are never rendered.
type RedisConfig struct {
	Host     string `json:"host"`
	Port     int    `json:"port"` // default 6379
	Database int    `json:"database"`
	Username string `json:"username"`
	Password string `json:"password"`
}

// DiskConfig is the documents' DiskLMCacheConfig.
type DiskConfig struct {
	CacheDir    string `json:"cacheDir"`
	MaxDiskSize int64  `json:"maxDiskSize"` // bytes
}

func (o *Options) check() (lmcacheconf.Config, error) {
	engine, err := lmcacheconf.Read(o.Engine, false)
	errs := []error{err}
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if e, ok := engine.Get("enable_pd"); ok && engine.Bool("enable_pd") {
		fault(e.Path, "is true, which is another protocol: P pushes to D and sends notices", "type: lmcache-pd")
	}
	for _, c := range []struct {
		path, value string
		known       []string
	}{
		{"backendType", o.BackendType, []string{"local", "redis", "disk"}},
		{"evictionPolicy", o.EvictionPolicy, []string{"lru", "lfu"}},
		{"engineClass", o.EngineClass, []string{ClassV1, ClassMP}},
	} {
		if c.value != "" && !slices.Contains(c.known, c.value) {
			fault(c.path, "is not a known value", "one of "+strings.Join(c.known, ", "))
		}
	}
	for _, c := range o.counts() {
		if c.value < 0 {
			fault(c.path, "is negative", "0 or more")
		}
	}
	o.checkBackend(fault)
	return engine, errors.Join(errs...)
}

// checkBackend requires the settings of the chosen backend.
func (o *Options) checkBackend(fault func(path, problem, remedy string)) {
	if r := o.RedisConfig; r != nil {
		if r.Host == "" || strings.ContainsAny(r.Host, "/@ ") {
			fault("redisConfig.host", "is not a host", "the name or address of the Redis server")
		}
		if r.Port > 65535 {
			fault("redisConfig.port", "is not a port", "1 to 65535")
		}
	}
	if o.DiskConfig != nil && o.DiskConfig.CacheDir == "" {
		fault("diskConfig.cacheDir", "is missing", "the folder for the chunks")
	}
	switch {
	case o.BackendType == "redis" && o.RedisConfig == nil:
		fault("redisConfig", "is missing", "backendType redis needs its host")
	case o.BackendType == "disk" && o.DiskConfig == nil:
		fault("diskConfig", "is missing", "backendType disk needs its cacheDir")
	}
	for _, e := range o.ServerEndpoints {
		if _, _, ok := hostPort(e); !ok {
			fault("serverEndpoints", "holds what is not host:port", "like lmcache-0.lmcache:65432")
			break
		}
	}
}

type count struct {
	path  string
	value int64
}

// counts lists the settings that cannot be negative: counts, sizes and durations.
func (o *Options) counts() []count {
	all := []count{{"poolSize", int64(o.PoolSize)}, {"maxCacheSize", o.MaxCacheSize}}
	for path, d := range map[string]*config.Duration{"settleTime": o.SettleTime,
		"connectionTimeout": o.ConnectionTimeout, "ttl": o.TTL} {
		if d != nil {
			all = append(all, count{path, int64(*d)})
		}
	}
	if o.LocalConfig != nil {
		all = append(all, count{"localConfig.maxMemoryMB", o.LocalConfig.MaxMemoryMB})
	}
	if o.RedisConfig != nil {
		all = append(all, count{"redisConfig.port", int64(o.RedisConfig.Port)},
			count{"redisConfig.database", int64(o.RedisConfig.Database)})
	}
	if o.DiskConfig != nil {
		all = append(all, count{"diskConfig.maxDiskSize", o.DiskConfig.MaxDiskSize})
	}
	slices.SortFunc(all, func(a, b count) int { return strings.Compare(a.path, b.path) })
	return all
}

func hostPort(s string) (host, port string, ok bool) {
	host, port, err := net.SplitHostPort(s)
	n, perr := strconv.Atoi(port)
	return host, port, err == nil && perr == nil && host != "" && n >= 1 && n <= 65535
}
