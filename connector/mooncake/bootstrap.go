// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/querycache"
	"github.com/pdkit/pdkit/discovery"
)

// maxResponse bounds a bootstrap server's response, in bytes: that of an engine of 1000 ranks with 8 workers each is
// smaller.
const maxResponse = 1 << 20

// notAgain is the minimum time between two queries for a rank that is missing. A wrong attribute must not cause a query
// for each request.
const notAgain = time.Second

// listing is the response of a bootstrap server. It is never changed.
type listing struct {
	addr  json.RawMessage // the server's URL, as JSON
	ranks []rank          // in order of their numbers; at least one
}

// rank is one data-parallel rank of an engine.
type rank struct {
	number int
	engine json.RawMessage // its engine id, as JSON
}

func (l *listing) find(number int) (rank, bool) {
	i, ok := slices.BinarySearchFunc(l.ranks, number, func(r rank, n int) int { return cmp.Compare(r.number, n) })
	if !ok {
		return rank{}, false
	}
	return l.ranks[i], true
}

// target is what Prefill and Decode need to know of P. Prepare finds it before the legs.
type target struct {
	url   string
	entry *querycache.Entry[*listing]
	rank  rank
	ranks int
}

var errNotPrepared = errors.New("mooncake: the prefill engine's bootstrap server was not asked")

// prepared returns what Prepare found. Without it no leg is built: D would die of a decode request without an engine
// id.
func prepared(s *connector.Session) (*target, error) {
	if t, ok := s.Prepared.(*target); ok {
		return t, nil
	}
	return nil, errNotPrepared
}

// Prepare finds the engine id of the rank of P that this attempt uses. If P's attributes give the number of ranks, the
// rank is the session's; otherwise it is one that P's bootstrap server names. If the ranks are spread over several
// pods, each pod has a bootstrap server, which counts the pod's ranks from 0 (mooncake_connector.py of vLLM 0.32.0:
// local_engines_only). After an error the flow tries another pair.
func (c *Connector) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	url, err := c.BootstrapURL(s.Prefill)
	if err != nil {
		return nil, err
	}
	ranks, err := attr.RanksOf(s.Prefill)
	if err != nil {
		return nil, err
	}
	entry, err := c.cache.Get(ctx, url, func() (*listing, error) { return query(ctx, url, call) })
	if err != nil {
		return nil, err
	}
	known := entry.Value
	t := &target{url: url, entry: entry, ranks: max(ranks.Local, len(known.ranks))}
	if s.Prefill.Attribute(attr.DPSize) == "" && s.Prefill.Attribute(attr.DPSizeLocal) == "" {
		t.rank = known.ranks[s.Uint64()%uint64(len(known.ranks))]
	} else {
		var ok bool
		if t.rank, ok = known.find(s.PrefillRank); !ok {
			if time.Since(entry.At) > notAgain {
				c.cache.Forget(url, entry)
			}
			return nil, errors.New("mooncake: the bootstrap server does not name the data-parallel rank that " +
				"was chosen")
		}
	}
	if t.ranks > 1 && s.API == connector.APIResponses {
		// The leg cannot name the rank, so D would ask a rank that never gets the prompt (docs/protocols/vllm.md §2).
		return nil, &connector.UnsupportedError{Member: "X-data-parallel-rank"}
	}
	return t, nil
}

// Clean forgets the bootstrap server's response after an attempt that failed because of the engines: P may have
// restarted with another engine id, which D does not know (docs/protocols/mooncake.md, recording 09).
func (c *Connector) Clean(_ context.Context, s *connector.Session, cause error, _ connector.Caller) error {
	if t, ok := s.Prepared.(*target); ok && querycache.Doubtful(cause) {
		c.cache.Forget(t.url, t.entry)
	}
	return nil
}

// BootstrapURL is the base address of P's bootstrap server: its attribute bootstrapURL, or P's host with the port of
// its attribute bootstrapPort or of the settings.
func (c *Connector) BootstrapURL(p discovery.Endpoint) (string, error) {
	if text := strings.TrimSpace(p.Attribute("bootstrapURL")); text != "" {
		u, err := discovery.ParseURL(text)
		if err != nil {
			return "", &attr.Error{Endpoint: p.ID, Attribute: "bootstrapURL",
				Problem: "is not a URL like http://HOST:8998"}
		}
		return u.String(), nil
	}
	if c.opts.BootstrapServerAddress != "" {
		return "", &attr.Error{Endpoint: p.ID, Attribute: "bootstrapURL",
			Problem: "is missing, and bootstrap_server_address says that the engine has no server of its own"}
	}
	port, err := attr.Port(p, "bootstrapPort", c.opts.port())
	if err != nil {
		return "", err
	}
	return "http://" + net.JoinHostPort(p.Host(), strconv.Itoa(port)), nil
}

// query asks a bootstrap server which engines it knows.
func query(ctx context.Context, url string, call connector.Caller) (*listing, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/query", nil)
	if err != nil {
		return nil, errors.New("mooncake: the bootstrap server's address is not a URL")
	}
	resp, err := call(r)
	if err != nil {
		return nil, fmt.Errorf("mooncake: the bootstrap server cannot be asked: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("mooncake: the bootstrap server answered %d", resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse+1))
	if err != nil {
		return nil, fmt.Errorf("mooncake: the bootstrap server's response is cut: %w", err)
	}
	if len(body) > maxResponse {
		return nil, errors.New("mooncake: the bootstrap server's response is too large")
	}
	ranks, err := parseRanks(body)
	if err != nil {
		return nil, err
	}
	return &listing{addr: connector.Quote(url), ranks: ranks}, nil
}

// parseRanks reads {"<rank>": {"engine_id": "…", …}, …}. It ignores other members, which newer engines may add.
func parseRanks(body []byte) ([]rank, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return nil, errors.New("mooncake: the bootstrap server's response is not a JSON object")
	}
	var ranks []rank
	for name, raw := range members {
		number, err := strconv.ParseUint(name, 10, 16)
		if err != nil || strconv.FormatUint(number, 10) != name {
			continue
		}
		var engine struct {
			ID string `json:"engine_id"`
		}
		if json.Unmarshal(raw, &engine) != nil || engine.ID == "" {
			continue
		}
		ranks = append(ranks, rank{number: int(number), engine: connector.Quote(engine.ID)})
	}
	if len(ranks) == 0 {
		return nil, errors.New("mooncake: the bootstrap server knows no engine")
	}
	slices.SortFunc(ranks, func(a, b rank) int { return cmp.Compare(a.number, b.number) })
	return ranks, nil
}

// CheckEndpoint reports what is malformed in a prefill engine's entry.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	if !e.Role.Has(discovery.RolePrefill) {
		return nil
	}
	_, faulty := c.BootstrapURL(e)
	_, odd := attr.RanksOf(e)
	return attr.Faults(errors.Join(faulty, odd), nil)
}
