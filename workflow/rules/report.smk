# One page over everything.
rule report_page:
    input:
        accepted_files(),
    output:
        report(
            RUN.report,
            caption="../report/index.rst",
            category="0 Overview",
            labels={"result": "whole run"},
        ),
    log:
        LOGS / "report.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    params:
        run=RUN.root,
    shell:
        "shakedown report {params.run:q} 2>&1 | tee {log:q}"
