// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// text is the part of a file in which citations are checked: the text of a Markdown file, the comments of a Go file,
// the sources that a golden file names.
type text struct{ file, text string }

// texts reads the texts of all files below root. It skips folders whose name begins with a dot.
func texts(root string) ([]text, error) {
	var found []text
	tree := os.DirFS(root)
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name != "." && strings.HasPrefix(d.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		read := readers[path.Ext(name)]
		if read == nil || strings.HasPrefix(name, recordings) {
			return nil
		}
		body, err := fs.ReadFile(tree, name)
		if err == nil {
			found = append(found, text{name, read(body)})
		}
		return err
	})
	return found, err
}

var goldenSource = regexp.MustCompile(`"(?:what|source)": ?"[^\n]*"`)

// readers return the text of a file, by the kind of file.
var readers = map[string]func(body []byte) string{
	".md":   func(body []byte) string { return string(body) },
	".json": func(body []byte) string { return strings.Join(goldenSource.FindAllString(string(body), -1), "\n") },
	".go":   comments,
}

// comments joins the lines of each comment, since a citation may continue on the next line.
func comments(body []byte) string {
	f, err := parser.ParseFile(token.NewFileSet(), "", body, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return "" // the compiler reports it
	}
	var b strings.Builder
	for _, group := range f.Comments {
		for _, c := range group.List {
			b.WriteString(strings.TrimSpace(strings.TrimPrefix(c.Text, "//")) + " ")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

const (
	protocols  = "docs/protocols/"
	recordings = protocols + "recordings/"
)

// elsewhere matches names of documents that are not in the repository.
var elsewhere = regexp.MustCompile(`(?i)\bcaptures?[ /](?:README|(?:nixl|nixl-push|mooncake|multi|example)\b|\d\d)` +
	`|go-notes|\b(?:GATEWAY|DESIGN|STYLE|BRIEF)\.md|\.\./shared\b` +
	`|(?:^\(?|\s|[^\]]\()(?:protocols/[\w-]+\.md|documents/\d)`)

var (
	ownDoc   = regexp.MustCompile(`(?:^|[\s("\x60])(docs/(?:protocols/[\w./-]+\w|[\w-]+\.md))`)
	section  = regexp.MustCompile(`([\w-]+)\.md(?:\]\([^)]*\))? §(\d+)`)
	recorded = regexp.MustCompile(`([\w-]+)\.md(?:\]\([^)]*\))?, recordings? (\d\d[a-z]?\b(?:(?:, | and | or | to ` +
		`)\d\d[a-z]?\b)*)`)
	number    = regexp.MustCompile(`\d\d[a-z]?`)
	heading   = regexp.MustCompile(`(?m)^#+ (.*)$`)
	codeBlock = regexp.MustCompile("(?ms)^(?:```.*?^```|    .*?$)")
	link      = regexp.MustCompile(`\]\(([^)\s]+)\)`)
)

// checkCitations returns one text for each citation of something that the repository does not have.
func checkCitations(root string, t text) []string {
	var found []string
	miss := func(format string, args ...any) {
		found = append(found, t.file+": "+fmt.Sprintf(format, args...))
	}
	for _, name := range elsewhere.FindAllString(t.text, -1) {
		miss("%q is not in the repository: put what is needed of it into docs/, and cite that", strings.TrimSpace(name))
	}
	for _, m := range ownDoc.FindAllStringSubmatch(t.text, -1) {
		if !exists(root, m[1]) {
			miss("%s does not exist", m[1])
		}
	}
	for _, m := range section.FindAllStringSubmatch(t.text, -1) {
		if m[1] == "README" {
			continue
		}
		page, err := os.ReadFile(filepath.Join(root, protocols, m[1]+".md"))
		if err != nil {
			page, err = os.ReadFile(filepath.Join(root, "docs", m[1]+".md"))
		}
		if err == nil && !strings.Contains(string(page), "\n## "+m[2]+". ") {
			miss("%s.md has no section %s", m[1], m[2])
		}
	}
	for _, m := range recorded.FindAllStringSubmatch(t.text, -1) {
		for _, n := range number.FindAllString(m[2], -1) {
			files, err := filepath.Glob(filepath.Join(root, recordings, m[1], n+"-*.json"))
			if err != nil || len(files) == 0 {
				miss("%s.md has no recording %s", m[1], n)
			}
		}
	}
	return found
}

// checkLinks returns one text for each relative link of a Markdown file whose target does not exist. It skips links in
// code.
func checkLinks(root string, t text) []string {
	var found []string
	for _, m := range link.FindAllStringSubmatch(codeBlock.ReplaceAllString(t.text, ""), -1) {
		target, anchor, _ := strings.Cut(m[1], "#")
		if strings.Contains(target, ":") {
			continue // an address with a scheme
		}
		name := t.file
		if target != "" {
			name = path.Join(path.Dir(t.file), target)
		}
		if !exists(root, name) {
			found = append(found, fmt.Sprintf("%s: the link %s leads nowhere", t.file, m[1]))
			continue
		}
		if anchor == "" || path.Ext(name) != ".md" {
			continue
		}
		page, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || !slices.Contains(anchors(string(page)), anchor) {
			found = append(found, fmt.Sprintf("%s: %s has no heading for #%s", t.file, name, anchor))
		}
	}
	return found
}

var dropped = regexp.MustCompile(`[^\p{L}\p{N} _-]`)

// anchors returns a page's headings as they are written in links.
func anchors(page string) []string {
	var found []string
	for _, m := range heading.FindAllStringSubmatch(codeBlock.ReplaceAllString(page, ""), -1) {
		found = append(found, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return found
}

func exists(root, name string) bool {
	_, err := os.Stat(filepath.Join(root, filepath.FromSlash(name)))
	return err == nil
}
