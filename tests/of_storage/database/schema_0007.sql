-- The tables of the release before this one, revision 0007, as SQLite has them.
CREATE TABLE alembic_version (
  version_num VARCHAR(32) NOT NULL,
  CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE blobs (
  digest VARCHAR(64) NOT NULL,
  size BIGINT NOT NULL,
  media_type VARCHAR(64) NOT NULL,
  created_at FLOAT NOT NULL,
  CONSTRAINT pk_blobs PRIMARY KEY (digest)
);
CREATE TABLE builds (
  id VARCHAR(64) NOT NULL,
  kernel VARCHAR(64) NOT NULL,
  slice VARCHAR(64) NOT NULL,
  toolchain VARCHAR(64) NOT NULL,
  target VARCHAR(16) NOT NULL,
  group_id VARCHAR(32),
  verify_group_id VARCHAR(32),
  state VARCHAR(20) NOT NULL,
  code_digest VARCHAR(64),
  resources JSON,
  log TEXT,
  created_at FLOAT NOT NULL,
  library VARCHAR(64),
  CONSTRAINT pk_builds PRIMARY KEY (id)
);
CREATE INDEX ix_builds_code_digest ON builds (code_digest);
CREATE INDEX ix_builds_group_id ON builds (group_id);
CREATE INDEX ix_builds_kernel ON builds (kernel);
CREATE INDEX ix_builds_slice ON builds (slice);
CREATE INDEX ix_builds_verify_group_id ON builds (verify_group_id);
CREATE TABLE jobs (
  id VARCHAR(32) NOT NULL,
  state VARCHAR(16) NOT NULL,
  cached BOOLEAN NOT NULL,
  priority INTEGER NOT NULL,
  budget_seconds FLOAT,
  deadline FLOAT,
  workspace_limit_bytes BIGINT,
  created_at FLOAT NOT NULL,
  started_at FLOAT,
  finished_at FLOAT,
  error TEXT,
  deterministic BOOLEAN DEFAULT 0 NOT NULL,
  CONSTRAINT pk_jobs PRIMARY KEY (id)
);
CREATE INDEX ix_jobs_created_at ON jobs (created_at);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE TABLE libraries (
  id VARCHAR(64) NOT NULL,
  kernel VARCHAR(64) NOT NULL,
  toolchain VARCHAR(64) NOT NULL,
  code_digest VARCHAR(64) NOT NULL,
  resources JSON NOT NULL,
  library VARCHAR(64) NOT NULL,
  cubin VARCHAR(64) NOT NULL,
  source VARCHAR(64) NOT NULL,
  created_at FLOAT NOT NULL,
  ptx VARCHAR(64),
  sass VARCHAR(64),
  CONSTRAINT pk_libraries PRIMARY KEY (id)
);
CREATE TABLE toolchains (
  digest VARCHAR(64) NOT NULL,
  description JSON NOT NULL,
  targets JSON NOT NULL,
  seen_at FLOAT NOT NULL,
  CONSTRAINT pk_toolchains PRIMARY KEY (digest)
);
CREATE TABLE verdicts (
  subject VARCHAR(64) NOT NULL,
  venue VARCHAR(8) NOT NULL,
  plan_version VARCHAR(64) NOT NULL,
  verdict VARCHAR(20) NOT NULL,
  message TEXT,
  details JSON NOT NULL,
  wall_seconds FLOAT NOT NULL,
  cpu_seconds FLOAT NOT NULL,
  created_at FLOAT NOT NULL,
  CONSTRAINT pk_verdicts PRIMARY KEY (subject, venue, plan_version)
);
CREATE TABLE winners (
  "key" VARCHAR(64) NOT NULL,
  revision INTEGER NOT NULL,
  operator VARCHAR(64) NOT NULL,
  target VARCHAR(16) NOT NULL,
  device_class VARCHAR(128) NOT NULL,
  problem JSON NOT NULL,
  record JSON NOT NULL,
  searches JSON NOT NULL,
  attempt VARCHAR(32) NOT NULL,
  updated_at FLOAT NOT NULL,
  CONSTRAINT pk_winners PRIMARY KEY ("key")
);
CREATE INDEX ix_winners_operator ON winners (operator);
CREATE INDEX ix_winners_updated_at ON winners (updated_at);
CREATE TABLE groups (
  id VARCHAR(32) NOT NULL,
  job_id VARCHAR(32),
  target VARCHAR(16) NOT NULL,
  toolchain VARCHAR(64),
  state VARCHAR(16) NOT NULL,
  kernels JSON NOT NULL,
  predicted_seconds FLOAT NOT NULL,
  source VARCHAR(64),
  log VARCHAR(64),
  library VARCHAR(64),
  cubin VARCHAR(64),
  phases JSON NOT NULL,
  codegen_seconds JSON NOT NULL,
  compile_seconds JSON NOT NULL,
  verify_seconds JSON NOT NULL,
  created_at FLOAT NOT NULL,
  started_at FLOAT,
  finished_at FLOAT,
  ptx VARCHAR(64),
  sass VARCHAR(64),
  joined_to VARCHAR(32),
  CONSTRAINT pk_groups PRIMARY KEY (id),
  CONSTRAINT fk_groups_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE SET NULL
);
CREATE INDEX ix_groups_job_id ON groups (job_id);
CREATE TABLE job_problems (
  id INTEGER NOT NULL,
  job_id VARCHAR(32) NOT NULL,
  position INTEGER NOT NULL,
  name VARCHAR(256) NOT NULL,
  operator VARCHAR(64) NOT NULL,
  problem JSON NOT NULL,
  target VARCHAR(16) NOT NULL,
  device_class VARCHAR(128) NOT NULL,
  "key" VARCHAR(64) NOT NULL,
  search JSON NOT NULL,
  state VARCHAR(16) NOT NULL,
  cached BOOLEAN NOT NULL,
  planned BOOLEAN NOT NULL,
  space_size BIGINT NOT NULL,
  candidate_count INTEGER NOT NULL,
  rejections JSON NOT NULL,
  seconds JSON NOT NULL,
  winner VARCHAR(64),
  error TEXT,
  started_at FLOAT,
  finished_at FLOAT,
  comparison JSON,
  screening BOOLEAN DEFAULT 0 NOT NULL,
  CONSTRAINT pk_job_problems PRIMARY KEY (id),
  CONSTRAINT fk_job_problems_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE,
  CONSTRAINT uq_job_problems_job_id_position UNIQUE (job_id, position)
);
CREATE INDEX ix_job_problems_job_id_state ON job_problems (job_id, state);
CREATE INDEX ix_job_problems_key ON job_problems ("key");
CREATE INDEX ix_job_problems_operator ON job_problems (operator);
CREATE TABLE candidates (
  job_problem_id INTEGER NOT NULL,
  candidate VARCHAR(64) NOT NULL,
  schedule JSON NOT NULL,
  kernel VARCHAR(64) NOT NULL,
  build VARCHAR(64) NOT NULL,
  verdict VARCHAR(20),
  message TEXT,
  predicted_us FLOAT,
  prediction JSON,
  measured_us FLOAT,
  measurement JSON,
  screening_build VARCHAR(64),
  CONSTRAINT pk_candidates PRIMARY KEY (job_problem_id, candidate),
  CONSTRAINT fk_candidates_job_problem_id_job_problems FOREIGN KEY(job_problem_id) REFERENCES job_problems (id) ON DELETE CASCADE
);
CREATE INDEX ix_candidates_build ON candidates (build);
CREATE TABLE measurements (
  code_digest VARCHAR(64) NOT NULL,
  candidate VARCHAR(64) NOT NULL,
  device_class VARCHAR(128) NOT NULL,
  driver VARCHAR(32) NOT NULL,
  plan_version VARCHAR(64) NOT NULL,
  median_us FLOAT NOT NULL,
  measurement JSON NOT NULL,
  created_at FLOAT NOT NULL,
  CONSTRAINT pk_measurements PRIMARY KEY (code_digest, candidate, device_class, driver)
);
CREATE TABLE devices (
  uuid VARCHAR(64) NOT NULL,
  device_class VARCHAR(128) NOT NULL,
  capability VARCHAR(8) NOT NULL,
  driver VARCHAR(32) NOT NULL,
  description JSON NOT NULL,
  worker VARCHAR(128) NOT NULL,
  seen_at FLOAT NOT NULL,
  drained TEXT,
  CONSTRAINT pk_devices PRIMARY KEY (uuid)
);
CREATE INDEX ix_devices_device_class ON devices (device_class);
CREATE INDEX ix_winners_device_class ON winners (device_class);
CREATE TABLE items (
  id INTEGER NOT NULL,
  kind VARCHAR(16) NOT NULL,
  target VARCHAR(128),
  ref VARCHAR(64) NOT NULL,
  job_id VARCHAR(32),
  priority INTEGER NOT NULL,
  predicted_seconds FLOAT NOT NULL,
  state VARCHAR(16) NOT NULL,
  attempt INTEGER NOT NULL,
  token VARCHAR(32),
  worker VARCHAR(128),
  lease_expires_at FLOAT,
  created_at FLOAT NOT NULL,
  started_at FLOAT,
  finished_at FLOAT,
  error TEXT,
  available_at FLOAT,
  phases JSON,
  past JSON DEFAULT '[]' NOT NULL,
  CONSTRAINT pk_items PRIMARY KEY (id),
  CONSTRAINT uq_items_kind_ref UNIQUE (kind, ref),
  CONSTRAINT fk_items_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE INDEX ix_items_job_id ON items (job_id);
CREATE INDEX ix_items_lease_expires_at ON items (lease_expires_at);
CREATE INDEX ix_items_state ON items (state);
CREATE INDEX ix_items_best ON items (state, kind, priority DESC,
  predicted_seconds DESC, id);
CREATE TABLE compile_models (
  toolchain VARCHAR(64) NOT NULL,
  family VARCHAR(128) NOT NULL,
  records JSON NOT NULL,
  updated_at FLOAT NOT NULL,
  CONSTRAINT pk_compile_models PRIMARY KEY (toolchain, family)
);
CREATE TABLE library_builders (
  library VARCHAR(64) NOT NULL,
  item_id INTEGER NOT NULL,
  token VARCHAR(32) NOT NULL,
  CONSTRAINT pk_library_builders PRIMARY KEY (library)
);
CREATE INDEX ix_groups_joined_to ON groups (joined_to);
INSERT INTO alembic_version VALUES ('0007');
