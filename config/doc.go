// SPDX-License-Identifier: Apache-2.0

// Package config reads settings strictly and says what is wrong with them, field by field.
//
// A connector decodes its own settings with [Decode] into a struct of its own. Each fault is a [FieldError]: the
// field's path, what is wrong, and what would be right, without the configured value. [Duration], [Quantity] and
// [Number] are the forms of values that settings have besides JSON's own. Package yamlfile below this one leads faults
// back to the lines of a YAML file.
package config
